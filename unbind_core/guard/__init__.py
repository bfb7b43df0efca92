"""The guard: no answer holds a run of protected lexemes that the client did not itself send. Exact, and without torch."""
