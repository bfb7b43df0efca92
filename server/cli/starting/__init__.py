"""While a server starts: its socket and who asks meanwhile, what is told of it, and the tour of the demo."""
