"""The only holder of tensors: turns a plan into forward passes over the slot cache and gives back logits.

Scheduler -> ``Runner.prefill`` / ``Runner.decode`` -> sampler. Each row's modules are applied by the model's hooks.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor

from server.engine.embedded.attention import SlotAttention
from server.engine.embedded.scheduler import Chunk
from server.engine.embedded.sight import attention_kinds
from server.engine.embedded.slots import Placement, SlotCache, placed
from server.engine.request import Flight
from unbind_core.applying.bank import ModuleBank
from unbind_core.applying.gate_memory import GateMemory, SlotPlaces
from unbind_core.applying.hooks import Intervention
from unbind_core.applying.passes import Pass, Record, where_forced
from unbind_core.applying.selection import Selection
from unbind_core.architecture import decoder_layers
from unbind_core.cpu.linears import PackedLinears
from unbind_core.cpu.speedups import EVERY, Speedups
from unbind_core.cpu.threads import ThreadChoice
from unbind_core.errors import UnbindError, UnsupportedArchitecture

LOGIT_TOLERANCE = 1e-3  # of the largest logit, float32; bfloat16 has 8 bits


class Runner:
    """Forward passes of one model over fixed slots; of different requests they can run side by side, each on its own thread.

    Raises UnsupportedArchitecture where the model keeps more than keys and values, or does not compute the same on the
    slot cache as without a cache (checked by running it, see ``self_test``).
    """

    def __init__(self, model: Any, bank: ModuleBank, slots: int, max_length: int, speedups: Speedups = EVERY) -> None:
        self.model = model
        self.bank = bank
        self.max_length = max_length
        self.vocabulary = int(model.get_output_embeddings().weight.shape[0])
        self._config: Any = self.model.config.get_text_config()
        self._full, self._window = attention_kinds(self._config, type(model).__name__)
        self.cache = SlotCache(len(decoder_layers(model)), slots, max_length)
        self.device = next(model.parameters()).device
        self.gate_memory = GateMemory(slots, max_length, self.device)
        self.dtype = next(model.parameters()).dtype
        self._threads = ThreadChoice(self.device) if speedups.threads else None
        with ExitStack() as attached:
            self.intervention = attached.enter_context(Intervention(model))
            self._packed: AbstractContextManager[None] = nullcontext()
            if speedups.packed:
                self._packed = packed = PackedLinears(model)
                attached.callback(packed.remove)
            self._attention = SlotAttention(self._config)
            attached.enter_context(self._attention)
            self._attached = attached.pop_all()  # for the engine's life; close() takes them off
        self._selected: dict[str, tuple[list[Any], Selection | None]] = {}
        self._keeps_logits = "logits_to_keep" in inspect.signature(self.model.forward).parameters

    def prefill(self, chunks: Sequence[Chunk], everywhere: bool = False) -> Tensor:
        """Compute prompt chunks; logits [B,V] of each chunk's last position, or [B,T,V] of all that are asked for."""
        width = max(chunk.count for chunk in chunks)
        rows = [chunk.flight.prompt[chunk.start : chunk.start + chunk.count] for chunk in chunks]
        ids = torch.tensor([row + (0,) * (width - len(row)) for row in rows])
        starts, counts = [chunk.start for chunk in chunks], [chunk.count for chunk in chunks]
        return self._forward([chunk.flight for chunk in chunks], ids, starts, counts, "prefill", everywhere)

    def decode(self, flights: Sequence[Flight]) -> Tensor:
        """One token further for each request; logits [B,V]."""
        ids = torch.tensor([flight.last_token for flight in flights])[:, None]
        return self._forward(flights, ids, [flight.computed for flight in flights], [1] * len(flights), "decode")

    def _forward(
        self,
        flights: Sequence[Flight],
        ids: Tensor,
        starts: Sequence[int],
        counts: Sequence[int],
        phase: str,
        everywhere: bool = False,
    ) -> Tensor:
        """``ids`` [B,T] padded on the right: row i is real in its first ``counts[i]`` columns, from ``starts[i]``."""
        steps = torch.arange(ids.shape[1])
        positions = torch.tensor(starts)[:, None] + steps
        padded = min(counts) < ids.shape[1]
        real = steps < torch.tensor(counts)[:, None]
        kept = sorted({count - 1 for count in counts})
        options: dict[str, Any] = {}
        if self._keeps_logits and not everywhere:
            options["logits_to_keep"] = torch.tensor(kept, device=self.device)
        written = positions.masked_fill(~real, self.max_length) if padded else positions
        slots = [flight.slot for flight in flights]
        placement = Placement.of(slots, starts, counts, written.to(self.device), self._attention.in_place)
        positions = positions.clamp_(max=self.max_length - 1).to(self.device)
        told = None
        if any(flight.request.quiet for flight in flights):
            quiet = torch.tensor([flight.request.quiet for flight in flights])
            told = (real & ~quiet[:, None]).to(self.device)
        selection = self._select(flights, phase)
        record: Record | None = [] if any(flight.request.report for flight in flights) else None
        opened: list[Tensor] | None = [] if any(_looks(flight) for flight in flights) else None
        sequences = zip(range(len(flights)), starts, counts, (flight.forced for flight in flights), strict=True)
        forced, eased = where_forced(sequences, positions)
        pass_ = Pass(
            places=self._places(selection, placement, starts),
            phase=phase,
            real=real.to(self.device) if padded else None,
            counts=told,
            record=record,
            opened=opened,
            requests=self._requests(flights) if selection is not None else None,
            forced=forced,
            eased=eased,
        )
        with (
            torch.inference_mode(),
            self._threads(ids.numel(), placement.length) if self._threads else nullcontext(),
            self._packed,
            placed(placement),
            self.intervention.step(selection, pass_),
        ):
            logits: Tensor = self.model(
                input_ids=ids.to(self.device),
                position_ids=positions,
                attention_mask=self._mask(positions, placement.length),
                past_key_values=self.cache,
                use_cache=True,
                **options,
            ).logits
        if record is not None:
            self._report(flights, record, counts)
        if opened:
            self._note(flights, torch.stack(opened).any(0), starts, counts)
        if everywhere:
            return logits
        if len(kept) == 1 and self._keeps_logits:
            return logits[:, 0]
        columns = [kept.index(count - 1) if self._keeps_logits else count - 1 for count in counts]
        return logits[torch.arange(len(counts)), columns]

    @staticmethod
    def _report(flights: Sequence[Flight], record: Record, counts: Sequence[int]) -> None:
        """Leave the gate activations at each row's last position with the requests that want them."""
        last = torch.tensor(counts) - 1
        found: list[dict[str, float]] = [{} for _ in flights]
        for names, values in record:
            for row, at_last in enumerate(values[torch.arange(len(counts)), last.to(values.device)].tolist()):
                found[row] |= dict(zip(names, at_last, strict=True))
        for flight, values_of in zip(flights, found, strict=True):
            if flight.request.report:
                flight.activations = {e.module.name: values_of.get(e.key, 0.0) for e in flight.request.modules.entries}

    @staticmethod
    def _note(flights: Sequence[Flight], opened: Tensor, starts: Sequence[int], counts: Sequence[int]) -> None:
        """Tell the requests that look for it where a gate is open first; ``opened`` bool [B,T], padding on the right."""
        for flight, row, start, count in zip(flights, opened.tolist(), starts, counts, strict=True):
            if _looks(flight) and True in row[:count]:
                flight.opens(start + row.index(True))

    def _places(self, selection: Selection | None, placement: Placement, starts: Sequence[int]) -> SlotPlaces | None:
        """Where gates with memory find and leave their state; None where no gate of the step has one."""
        if selection is None or not selection.remembers:
            return None
        begin = torch.tensor(starts, device=self.device)
        return SlotPlaces(self.gate_memory, placement.slots, placement.positions, begin)

    def _requests(self, flights: Sequence[Flight]) -> Tensor | None:
        """Which request each row is of, where the bank tells them apart."""
        return None if self.bank.requests is None else self.bank.requests.rows([flight.serial for flight in flights])

    def _select(self, flights: Sequence[Flight], phase: str) -> Selection | None:
        """The selection of these rows, kept while a phase's rows stay the same: making its key is slow for many modules."""
        sets = [flight.request.modules.identity for flight in flights]
        if not any(sets):
            return None
        known, selection = self._selected.get(phase, ([], None))
        if sets != known:
            selection = self.bank.select([flight.request.modules.strengths for flight in flights])
            self._selected[phase] = sets, selection
        return selection

    def _mask(self, positions: Tensor, length: int) -> Tensor | dict[str, Tensor]:
        """What each query sees, [B,1,T,length], by layer type where the model mixes full and sliding attention."""
        keys = torch.arange(length, device=self.device)
        full = keys <= positions[:, None, :, None]
        if self._window is None:
            return self._in_kind(full)
        sliding = full & (keys > positions[:, None, :, None] - self._window)
        if not self._full:
            return self._in_kind(sliding)
        return {"full_attention": self._in_kind(full), "sliding_attention": self._in_kind(sliding)}

    def _in_kind(self, visible: Tensor) -> Tensor:
        """To be added to the scores: made once a pass, where a boolean mask would be converted at every layer."""
        return torch.zeros_like(visible, dtype=self.dtype).masked_fill_(~visible, torch.finfo(self.dtype).min)

    def self_test(self, flight: Flight) -> None:
        """Prefill in two chunks and one decode step must give the logits of the plain model; also warms up.

        ``flight`` is a probe that holds slot 0. Raises UnsupportedArchitecture naming the model's class,
        and UnbindError where its logits are no numbers without a cache either.
        """
        probe, split = flight.prompt, len(flight.prompt) // 2
        try:
            self.prefill([Chunk(flight, 0, split)])
            prefilled = self.prefill([Chunk(flight, split, len(probe) - split)])
            flight.computed = len(probe)
            flight.output = [int(prefilled[0].argmax())]
            decoded = self.decode([flight])
        except (torch.OutOfMemoryError, UnsupportedArchitecture):
            raise
        except Exception as error:
            raise UnsupportedArchitecture(
                f"{type(self.model).__name__} does not run on the slot cache ({type(error).__name__}: {error}), as models with "
                "positions in the attention itself (ALiBi: Bloom) or attention of their own (Falcon) do not; serve a model with "
                "rotary or learned positions, or use unbind_core.attach"
            ) from error
        with torch.inference_mode():
            ids = torch.tensor([[*probe, *flight.output]], device=self.device)
            plain = self.model(input_ids=ids, use_cache=False).logits[0, -2:].float()
        if not bool(plain.isfinite().all()):
            raise UnbindError(
                f"model: its logits are no finite numbers in {str(self.dtype).removeprefix('torch.')}, with no cache either: its "
                "weights are damaged, or too large for this dtype; download it again, or give another --dtype"
            )
        off = (torch.cat([prefilled, decoded]).float() - plain).abs().max() / plain.abs().max()
        allowed = LOGIT_TOLERANCE if self.dtype == torch.float32 else 0.1
        if not bool(off <= allowed):
            raise UnsupportedArchitecture(
                f"{type(self.model).__name__}: logits on the slot cache differ from the plain model's by "
                f"{float(off):.2g} "
                "(relative), so this family needs its own kind of cache; serve another model, or use unbind_core.attach"
            )

    def reserve(self) -> None:
        """Room in the gates' memory for all modules of the bank, between passes: a table must not grow under one.

        Raises UnbindError where there is not enough.
        """
        self.gate_memory.reserve(self.bank.columns)

    def clear(self, slot: int) -> None:
        """Forget what a slot holds after a failed step: keys, values and what gates remember."""
        self.cache.clear(slot)
        self.gate_memory.clear(slot)

    def copy(self, source: int, target: int, count: int) -> None:
        """Have the first ``count`` positions of one slot in another as well: keys, values and what gates remember."""
        self.cache.copy(source, target, count)
        self.gate_memory.copy(source, target, count)

    def recover(self) -> None:
        """After a failed pass: give the device its unused memory back, so that the next one finds some."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Leave the model as it was."""
        self._attached.close()


def _looks(flight: Flight) -> bool:
    """Whether it still matters to a request where a gate opens."""
    return flight.request.watches and flight.opened is None
