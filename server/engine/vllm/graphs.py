"""CUDA graphs of whole decode steps that are cut where modules stand, and nowhere else.

vLLM replays such a step as one graph, in which nothing of ours would run. Here it is replayed in parts: up to a layer behind which
modules may stand, what they do to it, and on. While a graph runs what modules do is launched already, so that only the device's own
time for it is added to a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture, BreakableCUDAGraphWrapper
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode
from vllm.utils.torch_utils import weak_ref_tensor


def open_graphs(runner: Any) -> None:
    """Have the model's whole graphs, where vLLM's ``runner`` makes them, made of parts, before any is captured."""
    if isinstance(runner.model, CUDAGraphWrapper):
        runner.model = BreakableCUDAGraphWrapper(
            runner.model.runnable, runner.vllm_config, runtime_mode=CUDAGraphMode.FULL
        )


def between_graphs(work: Callable[..., None], hidden: Tensor, residual: Tensor | None, layer: int) -> None:
    """Do ``work`` on the arguments; where a graph is captured it ends here, the work is done, and again at every replay, and
    another graph begins. The arguments then stand where they stood; they are not kept alive, as their memory is the graphs'.
    """
    capture = BreakableCUDAGraphCapture.current()
    if capture is None:
        work(hidden, residual, layer)
        return
    at, beside = weak_ref_tensor(hidden), None if residual is None else weak_ref_tensor(residual)
    capture.add_eager(lambda: work(at, beside, layer))
