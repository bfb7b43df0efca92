"""Forget rows and checkpoints where several machines reach them and nobody else reads them."""
