"""What a takedown will take, from the settings."""
