"""``unbind bench gate``: gates on forget sets of growing size, side by side."""
