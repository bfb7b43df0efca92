"""The engine of this project: continuous batching of a transformers model over fixed KV slots, in this process."""
