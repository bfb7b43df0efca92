"""Attacks: what clients try to get protected code out of a model with a module, each against the model without and one retrained.

``registry`` names them, ``figures`` runs them. A fit never looks here: what is reported must not be what was aimed at.
"""
