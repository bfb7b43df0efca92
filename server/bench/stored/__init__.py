"""What a server with thousands of stored takedowns takes: its start, its memory, one more of them, and one answer."""
