"""The routes that generate, and what they share: bodies to requests in the engine, and answers back."""
