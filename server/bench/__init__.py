"""What is measured, a file each: figures are made here, and ``server/cli`` shows them."""
