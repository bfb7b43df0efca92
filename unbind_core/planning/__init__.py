"""What a fit will take, before it starts: memory, disk and time, from the model's shape and the rows."""
