"""Engines: what the service asks of one, what all of them do with an answer's tokens, and a folder for each."""
