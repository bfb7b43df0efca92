"""The only holder of tensors: turns a plan into forward passes over the slot cache and gives back logits.

Scheduler -> ``Runner.forward`` -> sampler. Each row's modules are applied by the model's hooks.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor

from server.engine.embedded.attention import SlotAttention
from server.engine.embedded.flat import Flat
from server.engine.embedded.scheduler import Chunk, Plan
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
        self.mixes = self._attention.in_place  # whether sequences of any lengths share a pass
        self._keeps_logits = "logits_to_keep" in inspect.signature(self.model.forward).parameters

    def forward(self, plan: Plan) -> Tensor:
        """A plan in one pass: logits [K,V], as many rows of each chunk as it is ``asked`` for, up to its last position's, then one
        of each request that goes one token further.
        """
        flat = Flat(plan, self.device)
        placement, wanted = flat.placement(self._attention.in_place), flat.wanted
        options: dict[str, Any] = {}
        if self._keeps_logits and len(wanted) < flat.total:
            options["logits_to_keep"] = torch.tensor(wanted, device=self.device)
        selection = self._select(flat.flights, flat.phase)
        pass_ = self._pass(flat, placement, selection)
        with (
            torch.inference_mode(),
            self._threads(flat.total, placement.length) if self._threads else nullcontext(),
            self._packed,
            placed(placement),
            self.intervention.step(selection, pass_, flat=True),
        ):
            logits: Tensor = self.model(
                input_ids=flat.ids,
                position_ids=placement.positions,
                attention_mask=self._mask(placement.positions, placement.length),
                past_key_values=self.cache,
                use_cache=True,
                **options,
            ).logits.flatten(0, 1)
        if pass_.record is not None:
            self._report(flat, pass_.record)
        if pass_.opened:
            self._note(flat, torch.stack(pass_.opened).any(0))
        return logits if len(wanted) == len(logits) else logits[wanted]

    def _pass(self, flat: Flat, placement: Placement, selection: Selection | None) -> Pass:
        """What edits are told of it."""
        flights, positions = flat.flights, placement.positions.view(-1)
        if selection is None:
            return Pass()
        rows = requests = told = places = None
        if selection.rows > 1 and flat.total > selection.rows:
            rows = flat.spread(torch.arange(selection.rows, device=self.device))
        if self.bank.requests is not None:
            requests = flat.spread(self.bank.requests.rows([flight.serial for flight in flights]))
        if any(flight.request.quiet for flight in flights):
            told = flat.spread(torch.tensor([not flight.request.quiet for flight in flights], device=self.device))
        if selection.remembers:
            slots, starts, firsts = torch.tensor(
                [[flight.slot for flight in flights], flat.starts, [part.start for part in flat.parts]],
                device=self.device,
            )
            places = SlotPlaces(self.gate_memory, slots, positions, starts, firsts)
        sequences = zip(flat.parts, flat.starts, flat.counts, (flight.forced for flight in flights), strict=True)
        forced, eased = where_forced(sequences, positions)
        return Pass(
            rows=rows,
            places=places,
            phase=flat.phase,
            counts=told,
            record=[] if any(flight.request.report for flight in flights) else None,
            opened=[] if any(map(_looks, flights)) else None,
            decoding=flat.decoding,
            requests=requests,
            forced=forced,
            eased=eased,
        )

    @staticmethod
    def _report(flat: Flat, record: Record) -> None:
        """Leave the gate activations at each sequence's last position with the requests that want them."""
        last = torch.tensor(flat.ends, device=flat.device) - 1
        found: list[dict[str, float]] = [{} for _ in flat.flights]
        for names, values in record:
            for own, at_last in zip(found, values[last].tolist(), strict=True):
                own |= dict(zip(names, at_last, strict=True))
        for flight, values_of in zip(flat.flights, found, strict=True):
            if flight.request.report:
                flight.activations = {e.module.name: values_of.get(e.key, 0.0) for e in flight.request.modules.entries}

    @staticmethod
    def _note(flat: Flat, opened: Tensor) -> None:
        """Tell the requests that look for it where a gate is open first; ``opened`` bool [N]."""
        everywhere = opened.tolist()
        for flight, part, start in zip(flat.flights, flat.parts, flat.starts, strict=True):
            if _looks(flight) and True in (own := everywhere[part]):
                flight.opens(start + own.index(True))

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

    def self_test(self, probe: Flight, *others: Flight) -> None:
        """A prompt in two chunks and one decode step must give the logits of the plain model, ``others`` with the same prompt in
        the same passes where passes are shared; also warms up.

        They hold the slots from 0. Raises UnsupportedArchitecture naming the model's class, and UnbindError where its logits are no
        numbers without a cache either.
        """
        count, split = len(probe.prompt), len(probe.prompt) // 2

        def passed(chunks: Sequence[Chunk], *decode: Flight) -> dict[Flight, Tensor]:
            plans = Plan(tuple(chunks), decode).passes(mixed=self.mixes)
            return {flight: row for plan in plans for flight, row in zip(plan.flights, self.forward(plan), strict=True)}

        try:
            passed([Chunk(probe, 0, split)])
            beside = [Chunk(other, 0, split) for other in others]
            prefilled = passed([Chunk(probe, split, count - split), *beside])[probe]
            probe.computed, probe.output = count, [int(prefilled.argmax())]
            last = passed([Chunk(other, split, count - split) for other in others], probe)
        except (torch.OutOfMemoryError, UnsupportedArchitecture):
            raise
        except Exception as error:
            raise UnsupportedArchitecture(
                f"{type(self.model).__name__} does not run on the slot cache ({type(error).__name__}: {error}), as models with "
                "positions in the attention itself (ALiBi: Bloom) or attention of their own (Falcon) do not; serve a model with "
                "rotary or learned positions, or use unbind_core.attach"
            ) from error
        with torch.inference_mode():
            ids = torch.tensor([[*probe.prompt, *probe.output]], device=self.device)
            plain = self.model(input_ids=ids, use_cache=False).logits[0, -2:].float()
        if not bool(plain.isfinite().all()):
            raise UnbindError(
                f"model: its logits are no finite numbers in {str(self.dtype).removeprefix('torch.')}, with no cache either: its "
                "weights are damaged, or too large for this dtype; download it again, or give another --dtype"
            )
        found = torch.stack([prefilled, *(last[other] for other in others), last[probe]]).float()
        off = (found - plain[[0] * (1 + len(others)) + [1]]).abs().max() / plain.abs().max()
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
