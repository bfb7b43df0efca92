"""The demo world: a small base model, an adapter that has memorised protected code, and the rows to try it with."""
