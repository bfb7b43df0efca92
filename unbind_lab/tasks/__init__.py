"""Executable tasks that a model of a few million parameters can do, and the harness that runs what was written."""
