"""What a CUDA device does with kernels of its own, which are imported where they are used."""
