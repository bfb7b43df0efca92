"""Applying modules: banks and selections of them, how gates decide, what they remember, and the hooks that put the edit to work."""
