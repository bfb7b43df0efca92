"""What stands between vLLM's decoder layers: an operator that adds the corrections of the step's modules to a layer's output.

One :class:`Edits` for each process of the model. The operator is opaque to compilation, and graphs are cut at it, see
``graphs.py``.
"""

from __future__ import annotations

import dis
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from vllm.forward_context import get_forward_context
from vllm.utils.torch_utils import direct_register_custom_op

from server.engine.vllm.batch import Batch
from server.engine.vllm.graphs import between_graphs
from server.engine.vllm.pages import LastPositions, PagedMemory, Pages, whole
from unbind_core.applying.bank import ModuleBank
from unbind_core.applying.passes import Pass, Record, where_forced
from unbind_core.applying.selection import Selection
from unbind_core.architecture import outermost_lists
from unbind_core.errors import UnbindError

OPERATOR = "unbind::edit"
COLUMNS_OF_ONE, BYTES_OF_ONE = 25, 2700  # of a module of 24 rows; for each number of a state
_KEPT = "unbind"  # the name of what a forward pass keeps with vLLM's context of it


@dataclass(frozen=True)
class Step:
    """One forward pass. ``legs``, ``starts`` and ``counts`` by request, of those that wish to hear of their gates."""

    selection: Selection
    count: int
    pass_: Pass
    legs: Sequence[str]
    starts: Sequence[int]
    begins: Sequence[int]
    counts: Sequence[int]


class Edits:
    """The modules of this process's layers, and what each forward pass does with them."""

    def __init__(self, runner: Any, columns: int, looks: bool = True) -> None:
        """``runner``: vLLM's, whose batch says which request stands where. ``columns`` of the gates' memory; ``looks``: whether
        scores and requests of gates are counted.
        """
        requests = runner.max_num_reqs if looks else 0
        self.bank = ModuleBank(runner.device, one_table=True, requests=requests, dtype=runner.dtype)
        self.columns = columns
        self.sets: dict[str, Mapping[str, float]] = {}
        self._runner = runner
        self._memory: PagedMemory | None = None
        self._attention = ""
        self._batch = Batch.of([], [], runner.device)  # of the step before
        self._selected: tuple[Batch, int, Selection | None] = (self._batch, -1, None)  # of the bank's version
        self.passed: list[Step] = []  # of which somebody wishes to hear, until they are told
        self.scheduled: Mapping[str, int] = {}  # tokens of the step, by request; none outside a step
        self.checks = 0  # passes whose places are still to be compared with vLLM's own

    def install(self, model: nn.Module, wanted: Sequence[int] = ()) -> list[int]:
        """Put the operator behind the ``wanted`` decoder layers that this process has, all where none are named, and its last where
        it has none of them; gives their indices. Raises UnbindError.
        """
        layers = decoder_layers(model, self._runner.model_config.get_total_num_hidden_layers())
        own = [i for i, layer in enumerate(layers) if type(layer).__name__ != "PPMissingLayer"]  # which others have
        found = [index for index in own if index in wanted or not wanted] or own[-1:]
        for index in found:
            layers[index].forward = _edited(layers[index], index)
        global _edits  # noqa: PLW0603 - an operator has no object of its own
        _edits = self
        return found

    def allocate(self, config: Any) -> None:
        """Make the gates' memory once vLLM has planned its pages. Raises UnbindError where no layer keeps all of its pages."""
        groups = config.kv_cache_groups
        spec = whole(group.kv_cache_spec for group in groups)[0]
        self._attention = next(group.layer_names[0] for group in groups if group.kv_cache_spec == spec)
        self._memory = PagedMemory(config.num_blocks, spec.block_size, self.columns, self._runner.device)

    def share_of_pages(self, layers: Iterable[Any]) -> float:
        """How much of the memory for keys and values is theirs, by vLLM's ``layers``' specs; the rest is the gates'.

        Layers of several kinds, as of full attention and of windows, take turns: vLLM has them in groups that share the pages,
        of as many layers as the rarest kind has, or more. A group of more leaves the gates more than they need.
        Raises UnbindError as ``allocate``: with a share of nothing vLLM would say that there is too little memory.
        """
        kinds = Counter(layers)
        most = max(spec.page_size_bytes / spec.block_size for spec in whole(kinds))
        kept = min(kinds.values()) * most
        return float(kept / (kept + 4 * self.columns))

    def room_for_modules(self, width: int) -> int:
        """Bytes that modules take whose gates fill the columns, at states of ``width`` numbers: modules of 24 rows, as fits make
        them.
        """
        return math.ceil(self.columns / COLUMNS_OF_ONE) * BYTES_OF_ONE * width

    def apply(self, hidden: Tensor, residual: Tensor | None, layer: int) -> None:
        """Add to ``hidden`` [N,d] in place; with ``residual`` it makes the layer's output."""
        context = get_forward_context()
        kept = context.additional_kwargs
        if _KEPT not in kept:
            kept[_KEPT] = self._begin(context.attn_metadata)
        step: Step | None = kept[_KEPT]
        if step is None or layer not in step.selection.layers:
            return
        mine = hidden[: step.count]
        states = mine
        if residual is not None:  # rounded as the layer's own sum is, and FP32 at once, as it is read
            states = torch.add(mine, residual[: step.count], out=mine.new_empty(mine.shape, dtype=torch.float32))
        edited = step.selection.edit(layer, states, step.pass_, to=mine, in_place=True).states
        if edited is not mine:
            mine.copy_(edited)

    def _begin(self, metadata: Any) -> Step | None:
        """What this forward pass applies; None for vLLM's own runs, of no request, and where none asks for a module."""
        if metadata is None or not self.scheduled:
            return None
        if not isinstance(metadata, dict):
            raise UnbindError("the batch is split in two (dual-batch overlap), which modules do not go with")
        ours, runner = metadata[self._attention], self._runner.input_batch
        batch = self._batch_of(runner.req_ids)
        missing = {digest for digest in batch.digests if digest} - self.sets.keys()
        if missing:  # never without the modules that a request must have
            raise UnbindError(f"the modules of a request are not here: {', '.join(sorted(missing))}")
        selection = self._selection_of(batch)
        if selection is None:
            return None
        size, counts = len(batch.names), [self.scheduled[name] for name in batch.names]
        count = sum(counts)  # a whole graph's own number counts what fills it up, too
        begins = ours.query_start_loc[: size + 1]
        device = begins.device
        # Where every request has one token, as in most steps, what is said by request is said by position already.
        which: Tensor | None = None
        starts: Tensor | None = None
        positions: Tensor | None = None
        if max(counts) > 1:
            lengths = begins.diff()
            starts = ours.seq_lens[:size].long() - lengths
            which = torch.arange(size, device=device).repeat_interleave(lengths, output_size=count)
            positions = torch.arange(count, device=device) - begins[which].long() + starts[which]

        def spread(values: Tensor | None) -> Tensor | None:
            return values if values is None or which is None else values[which]

        places: Pages | None = None
        if selection.remembers:
            assert self._memory is not None
            here = ours.slot_mapping[:count]
            if starts is None or positions is None:
                places = LastPositions(self._memory, ours.block_table, ours.seq_lens[:size], here)
            else:
                places = Pages(self._memory, ours.block_table, begins[:-1], starts, positions, here)
            if self.checks > 0:
                self.checks -= 1
                if not torch.equal(places.rows(places.positions, places.sequences), places.here):
                    raise UnbindError("vLLM's pages are not where the gates look for them")
        computed = runner.num_computed_tokens_cpu[:size]
        later = (computed >= runner.num_prompt_tokens[:size]).tolist()
        phase = "decode" if all(later) else "prefill"
        decoding = None
        if any(later) and phase == "prefill":
            decoding = spread(torch.tensor(later, device=device))
        told = self.bank.requests
        of = None if told is None else spread(told.rows(batch.flights))
        record: Record | None = [] if batch.reports else None
        opened: list[Tensor] | None = [] if batch.watching else None
        rows, counted = spread(batch.rows), spread(batch.counted)
        watching, firsts = batch.watching, [0, *accumulate(counts)]
        forced = eased = None
        if batch.forced:
            here = ours.seq_lens[:size].long() - 1 if positions is None else positions
            parts = [
                (slice(firsts[i], firsts[i + 1]), int(computed[i]), counts[i], spans)
                for i, spans in batch.forced.items()
            ]
            forced, eased = where_forced(parts, here)
        pass_ = Pass(rows, places, phase, None, counted, record, opened, decoding, of, forced, eased)
        step = Step(
            selection,
            count,
            pass_,
            batch.legs,
            [int(computed[i]) for i in watching],
            [firsts[i] for i in watching],
            [counts[i] for i in watching],
        )
        if watching:
            self.passed.append(step)
        return step

    def _batch_of(self, names: Sequence[str]) -> Batch:
        """What the requests of a step ask for: made once for as long as they are the same."""
        if self._batch.names != names:
            asked = [self._runner.requests[name].sampling_params.extra_args or {} for name in names]
            self._batch = Batch.of(names, asked, self._runner.device)
        return self._batch

    def _selection_of(self, batch: Batch) -> Selection | None:
        """Made once for as long as batch and modules are the same; what a digest stands for never changes."""
        of, version, selection = self._selected
        if of is not batch or version != self.bank.version:
            version = self.bank.version
            selection = self.bank.select([self.sets[digest] if digest else {} for digest in batch.digests])
            self._selected = batch, version, selection
        return selection

    def told(self) -> list[tuple[str, int, int, int, dict[str, float]]]:
        """Of each request that wished to hear: its leg, first position and count of the pass, where in it a gate that acts was open
        first (-1: nowhere), and the activations at its last position by the modules' keys.
        """
        found = []
        for step in self.passed:
            opened = torch.stack(step.pass_.opened).any(0).tolist() if step.pass_.opened else None
            lasts = [begin + count - 1 for begin, count in zip(step.begins, step.counts, strict=True)]
            values = [(names, table[lasts].tolist()) for names, table in step.pass_.record or []]
            for i, leg in enumerate(step.legs):
                begin, count = step.begins[i], step.counts[i]
                part = opened[begin : begin + count] if opened else []
                first = part.index(True) if True in part else -1
                own: dict[str, float] = {}
                for names, tables in values:
                    own.update({name: value for name, value in zip(names, tables[i], strict=True) if value})
                found.append((leg, step.starts[i], count, first, dict(own)))
        self.passed.clear()
        return found


def decoder_layers(model: nn.Module, count: int) -> nn.ModuleList:
    """The list of a model's ``count`` decoder layers as vLLM builds it. Raises UnbindError where there is not exactly one."""
    found = outermost_lists(model, count)
    if len(found) != 1:
        raise UnbindError(f"{type(model).__name__}: its decoder layers are not found; use the embedded engine")
    return found[0][1]


def _edited(layer: nn.Module, index: int) -> Any:
    """A layer's ``forward`` with the operator behind it."""
    forward, in_parts = layer.forward, _takes_residual(type(layer))

    def run(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        hidden, *beside = output if isinstance(output, tuple) else (output,)
        torch.ops.unbind.edit(hidden, beside[0] if in_parts and beside else None, index)
        return output

    return run


def _takes_residual(layer: type[nn.Module]) -> bool:
    """Whether such layers read the ``residual`` that they are given: only then is a state the sum of both that a layer gives.

    Others (Cohere, StableLM, Phi-MoE, EXAONE 4, Granite 4) begin by writing over it, or take none. What they give first is the
    whole state, and with their second, of no use to anybody, it would be another than the one that modules are fitted on.
    """
    for step in dis.get_instructions(layer.forward):
        names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        kinds: list[str] = re.findall("LOAD|STORE", step.opname) if "_FAST" in step.opname else []  # 3.13: two at once
        for kind, name in zip(kinds, names, strict=False):
            if name == "residual":
                return kind == "LOAD"
    return False


_edits: Edits | None = None


def _edit(hidden: Tensor, residual: Tensor | None, layer: int) -> None:
    assert _edits is not None
    states = hidden[0] if hidden.dim() == 3 else hidden  # layers of transformers' own have all of a step in one row
    between_graphs(_edits.apply, states, residual, layer)


def _edit_fake(hidden: Tensor, residual: Tensor | None, layer: int) -> None:  # noqa: ARG001 - as the operator has them
    return None


_library = torch.library.Library("unbind", "DEF")
direct_register_custom_op("edit", _edit, ["hidden"], _edit_fake, _library)
