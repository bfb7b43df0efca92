"""Compiles and launches the kernels of a decode step for ``applying/fused.py``. Importing this needs Triton."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from unbind_core.cuda import kernels
from unbind_core.cuda.addressed import Addressed


class DecodeKernels:
    """Both kernels as they are compiled for one device, states of one size and one dtype, and one kind of memory."""

    def __init__(
        self,
        device: torch.device,
        boundaries: Sequence[float],
        d: int,
        dtype: torch.dtype,
        positions: torch.dtype,
        tables: torch.dtype,
    ) -> None:
        """Compiles them, which takes seconds the first time. ``boundaries`` of scores, in thresholds, by which positions are
        counted; states of ``d`` numbers, edited in ``dtype``; ``positions`` and ``tables`` are the dtypes of those that
        ``Addresses`` have. Raises whatever Triton does where it cannot.
        """
        self._device, self._d = device, d
        self._several = device.type == "cuda" and torch.cuda.device_count() > 1
        with torch.inference_mode(False):
            self._bounds = torch.full((kernels.BOUNDS,), torch.inf, device=device)
            self._bounds[: len(boundaries)] = torch.tensor(boundaries, device=device)
            self._none = torch.zeros(1, dtype=torch.bool, device=device)  # in place of what is not given
        self._decide: Any = kernels.decide
        self._correct: Any = kernels.correct
        with torch.inference_mode(), self.here():
            self._decide, self._correct = self._built(dtype, positions, tables)

    def here(self) -> AbstractContextManager[Any]:
        """Inside, the device is the current one, to which kernels go."""
        if self._several and self._device.index != torch.cuda.current_device():
            return torch.cuda.device(self._device)
        return nullcontext()

    def decide(
        self,
        products: Tensor,
        offsets: Tensor,
        first: int,
        modules: Tensor,
        closes: Tensor,
        weights: Tensor,
        rows: Tensor | None,
        where: Any,
        tally: Tensor,
        counted: Tensor | None,
        requests: Tensor | None,
        tables: tuple[Tensor, Tensor] | None,
        states: Tensor,
        by: Addressed,
        work: Tensor,
    ) -> Any:
        """What the gates of m modules decide at N states, m of the M of a part from the one numbered ``first`` on.

        ``products`` FP32 [m,N,most], to which ``offsets`` FP32 [m,1,most] are added, are scores in grains. ``modules`` int32
        [M,FIELDS]; ``closes`` FP32 [M], in thresholds; ``weights`` FP32 [R,M]: how strongly each row of the selection has a module
        act, below 0 where it does not ask for it; ``rows`` int64 [N], None where state i is row i or R is 1; ``where``:
        ``Addresses``. ``tally`` int64 [M,BINS], of states that are ``counted`` bool [N]. ``requests`` int64 [N], rows of the first
        of two ``tables``: int32 [requests,slots], whether a gate was open for one, and int64 [slots], for how many. ``states`` FP32
        [N,d], and of ``by`` the matrices, are read where a correction acts.

        Written are the memory's rows and ``work`` FP32 [N,M + ranks + M]: amounts, 0 where a gate is closed and below 0 where one
        is open that only measures; amount factor max(A h + bias, least) of each rank whose module acts, the others as they are;
        and scores, in thresholds.
        """
        m, count, most = products.shape
        in_all = len(modules)
        by_row = 0 if len(weights) == 1 else 1 if rows is not None else 2
        opened, hits = tables if tables is not None else (modules, tally)
        return self._decide[m, count, 1](
            products, offsets, count, most, modules, closes, first, in_all, work.shape[1] - 2 * in_all,
            weights, tally if rows is None else rows, by_row,
            where.memory, where.memory.stride(0), where.positions, where.ahead,
            where.tables, where.tables.stride(0), where.size, int(where.paged),
            tally, self._bounds, self._none if counted is None else counted, int(counted is not None),
            tally if requests is None else requests, int(requests is not None and tables is not None),
            opened, opened.stride(0), hits, states, by.matrices, by.factors, by.factors if by.edge is None else by.edge,
            int(by.edge is not None), self._d, work,
        )  # fmt: skip

    def correct(self, to: Tensor, out: Tensor, work: Tensor, by: Addressed, modules: Tensor, in_place: bool) -> Any:
        """``out`` [N,d] becomes ``to`` [N,d], plus what acts of ``work``, see :meth:`decide`. ``in_place``: they are the same, and
        stay as they are where nothing acts.
        """
        in_all = len(modules)
        return self._correct[len(to), -(-self._d // kernels.BLOCK), 1](
            to,
            out,
            work,
            by.matrices,
            by.constants,
            modules,
            self._d,
            in_all,
            work.shape[1] - 2 * in_all,
            int(in_place),
        )

    def _built(self, dtype: torch.dtype, positions: torch.dtype, tables: torch.dtype) -> tuple[Any, Any]:
        """Both kernels after a launch each, for one module of rank 1 whose gate stays closed. What they are compiled for is what
        this object is made for and ``FusedPart.where`` makes sure of, so that from now on they are launched as they are compiled:
        Triton's own way there, which looks at every argument, takes twice as long.
        """
        d = self._d

        def zeros(*shape: int, of: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=of, device=self._device)

        where = SimpleNamespace(
            memory=zeros(2, 2, of=torch.int32), positions=zeros(1, of=positions), ahead=0, tables=zeros(1, 1, of=tables),
            size=1, paged=True,
        )  # fmt: skip
        modules = torch.tensor([[0, 1, 1, 0, 1, 1, 0, 0, 1, 1]], dtype=torch.int32, device=self._device)
        by = Addressed(zeros(1, 2, of=torch.int64), zeros(1), zeros(1, d), None)
        tally, work, to = zeros(1, kernels.BINS, of=torch.int64), zeros(1, 3), zeros(1, d, of=dtype)

        def decide() -> Any:
            return self.decide(
                zeros(1, 1, 1), zeros(1, 1, 1), 0, modules, zeros(1), zeros(1, 1), None, where, tally, None, None, None,
                zeros(1, d), by, work,
            )  # fmt: skip

        def correct() -> Any:
            return self.correct(to, to, work, by, modules, in_place=True)

        built = decide(), correct()
        if not all(
            hasattr(one, "__getitem__") for one in built
        ):  # interpreted, or of a version that gives nothing back
            return kernels.decide, kernels.correct
        self._decide, self._correct = built
        try:
            decide(), correct()
        except Exception:  # noqa: BLE001 - of a version with another way to launch
            return kernels.decide, kernels.correct
        return built
