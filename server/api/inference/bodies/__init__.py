"""What clients send to the routes that generate: a file for each family of bodies."""
