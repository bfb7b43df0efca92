"""HTTP as it comes over connections: limits, and clients whose HTTP is of another version."""
