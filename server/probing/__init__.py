"""Canaries: the server asks itself, by the way that clients ask, whether its modules do what they should."""
