"""The embedded engine: continuous batching over any transformers causal language model with fixed KV slots."""
