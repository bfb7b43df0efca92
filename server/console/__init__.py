"""The web page at ``/``: one file, no build step, nothing loaded from elsewhere."""
