"""``unbind bench engines``: the engines against each other. Needs vLLM in the environment that runs it."""
