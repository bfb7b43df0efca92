"""Thin HTTP routes: they validate, ask the policy, call engine or registry, and shape the answer."""
