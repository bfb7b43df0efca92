"""Calls of functions in chats: the formats in which models write them, and what comes of an answer that holds some."""
