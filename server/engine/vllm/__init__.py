"""vLLM as the engine: its scheduler, kernels and processes, with modules at its layers. Needs its extra."""

from __future__ import annotations

import os

# Read by vLLM when it is first imported, and by its processes.
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # the edits were tried with the other one
for _name, _value in (
    ("VLLM_NO_USAGE_STATS", "1"),
    ("VLLM_LOGGING_LEVEL", "ERROR"),
    ("VLLM_LOGGING_STREAM", "ext://sys.stderr"),  # what a command prints is its own
    ("VLLM_WORKER_MULTIPROC_METHOD", "spawn"),
    (
        "VLLM_CPU_INT4_W4A8",
        "0",
    ),  # states rounded to 8 bits before each product are not those that modules were fitted on
):
    os.environ.setdefault(_name, _value)
