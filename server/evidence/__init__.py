"""What was done about a takedown, in one signed document that can be checked years later without this service."""
