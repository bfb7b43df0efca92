"""What a takedown takes at real model sizes: ``unbind bench scale``."""
