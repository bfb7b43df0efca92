"""Corrections: what they are learned from, towards which reference, and how."""
