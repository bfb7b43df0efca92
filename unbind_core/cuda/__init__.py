"""What a CUDA device does with kernels of its own; nothing here is imported where they are not used."""
