"""What a module does: what is recovered of protected rows, and what changes on held-out ones."""
