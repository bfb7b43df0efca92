"""The takedown worker: a process of its own that claims jobs, fits modules and publishes them."""
