"""The modules that vLLM's processes hold, as the table of modules sees them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from unbind_core.applying.bank import ModuleBank
from unbind_core.applying.looks import Look, together
from unbind_core.errors import UnbindError
from unbind_core.module import UnbindModule

PROBE_COLUMNS = 2  # of the probe of a stage: a head's and its state's

ByPhase = dict[str, tuple[int, int]]


class RemoteBank(ModuleBank):
    """A bank whose modules are put to work elsewhere; its counts are the latest that were heard."""

    def __init__(self) -> None:
        super().__init__(one_table=True)
        self._seen: dict[str, ByPhase] = {}
        self._kept: dict[str, ByPhase] = {}  # by processes that have ended
        self._looks: Mapping[str, Look] = {}
        self._kept_looks: Mapping[str, Look] = {}

    def contents(self) -> dict[str, UnbindModule]:
        """Every module, by key."""
        return {key: self[key] for key in self.names}

    def check(self, columns: int, taken: int, layers: Sequence[int]) -> None:
        """Raises UnbindError where the gates of all modules, beside what is ``taken``, need more ``columns`` than there are, or one
        stands at none of ``layers``, where any are named.
        """
        elsewhere = [module for module in self.contents().values() if layers and module.layer not in layers]
        if elsewhere:
            named = ",".join(map(str, sorted({*layers, *(module.layer for module in elsewhere)})))
            raise UnbindError(
                f"a module stands at decoder layer {elsewhere[0].layer}, and the engine was started for modules at "
                f"{', '.join(map(str, layers))} alone; start the server with --gate-layers {named}, or without that setting"
            )
        wanted = self.columns.get(0, 0) + taken
        if wanted > columns:
            raise UnbindError(
                f"the gates of the modules need {wanted} columns of memory, and there are {columns}; load fewer modules, or "
                f"start the server with --gate-columns {wanted} or more"
            )

    def seen(self, counts: Mapping[str, ByPhase], looks: Mapping[str, Look]) -> None:
        """What the processes have counted since they started."""
        self._seen, self._looks = dict(counts), looks

    def keep(self, counts: Mapping[str, ByPhase], looks: Mapping[str, Look]) -> None:
        """The processes have ended, whose last counts these are: others begin at nothing."""
        self._kept = {
            key: _sum(self._kept.get(key, {}), counts.get(key, {})) for key in self._kept.keys() | counts.keys()
        }
        self._kept_looks = together(self._kept_looks, looks)
        self._seen, self._looks = {}, {}

    def looks(self) -> dict[str, Look]:
        """See :meth:`ModuleBank.looks`; of modules that were ever here, and not of the probes."""
        own = super().counts().keys()
        return {key: look for key, look in together(self._kept_looks, self._looks).items() if key in own}

    def counts(self) -> dict[str, ByPhase]:
        """See :meth:`ModuleBank.counts`."""
        return {
            key: _sum(zeros, _sum(self._kept.get(key, {}), self._seen.get(key, {})))
            for key, zeros in super().counts().items()
        }


def in_parts(modules: Mapping[str, UnbindModule], size: int) -> Iterator[dict[str, bytes]]:
    """The modules' files by key, some at a time: of ``size`` bytes, and what the last of them has beyond."""
    part: dict[str, bytes] = {}
    for key, module in modules.items():
        part[key] = module.to_bytes()
        if sum(map(len, part.values())) >= size:
            yield part
            part = {}
    if part:
        yield part


def _sum(one: ByPhase, other: ByPhase) -> ByPhase:
    return {
        phase: tuple(a + b for a, b in zip(one.get(phase, (0, 0)), other.get(phase, (0, 0)), strict=True))  # type: ignore[misc]
        for phase in one.keys() | other.keys()
    }
