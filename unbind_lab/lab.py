"""The loop: every system in each of its configurations, made, tuned where it can be, and measured. Resumable at every step.

A system is tuned on another forget set and other retain rows than those that are reported: made for those rows in each
configuration of its grid, it keeps the one with the highest FU-H there, and is made again for the reported rows.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch import nn

from unbind_core.errors import FittingError, UnbindError, UnsupportedArchitecture
from unbind_core.evaluation import metrics, scores
from unbind_core.files import write_text
from unbind_core.progress import ProgressCallback, counted, silent
from unbind_core.rows import ForgetRow, forget_digest
from unbind_lab import served as served_by
from unbind_lab.filters.filter import Absent, Filter
from unbind_lab.filters.models import FULL
from unbind_lab.keeping import Kept, code_of, digest
from unbind_lab.protocols import main
from unbind_lab.protocols.known import PROTOCOLS
from unbind_lab.protocols.protocol import Protocol
from unbind_lab.served import Served
from unbind_lab.setting import Bench, Setting
from unbind_lab.systems import System
from unbind_lab.trained import step, training
from unbind_lab.trained.training import Configuration, Rows, Trained, Weights, started_from, train

Report = Callable[[str], None]
# What a system says that cannot be had of a setting's rows or model. Others can.
IMPOSSIBLE = (Absent, FittingError, UnsupportedArchitecture)
LABELS = ("shipped", "paper", "tuned")  # configurations: a system without any of its own is shipped


@dataclass(frozen=True)
class Entry:
    """A row of the table: a system in a configuration (``shipped``, ``paper``, ``tuned``) and what that is."""

    system: System
    label: str
    options: Mapping[str, Any]

    @property
    def name(self) -> str:
        """How its files are named."""
        return f"{self.system.name}-{self.label}"


class Lab:
    """A setting and the folder of its run."""

    def __init__(
        self,
        setting: Setting,
        out: Path,
        *,
        device: str = "cpu",
        report: Report = lambda _: None,
        progress: ProgressCallback = silent,
    ) -> None:
        self.setting, self.bench = setting, Bench(setting, device)
        self.kept = Kept(out / setting.name)
        self.report, self.progress = report, progress

    def run(
        self, systems: Sequence[System], protocols: Sequence[str] = ("main",), configurations: Sequence[str] = LABELS
    ) -> None:
        """Everything that is asked for and not there yet; the summaries are files.

        Raises UnbindError for an unknown protocol or configuration, for files of the user's that a protocol needs, and at the end,
        where all others are measured, for systems that this setting cannot have.
        """
        for label in configurations:
            if label not in LABELS:
                raise UnbindError(f"--configurations: '{label}' is unknown; choose from {', '.join(LABELS)}")
        for protocol in protocols:
            if protocol not in PROTOCOLS:
                raise UnbindError(f"--protocols: '{protocol}' is unknown; choose from {', '.join(PROTOCOLS)}")
            PROTOCOLS[protocol].files_of(self.setting)  # what is missing is said before anything is made
        absent = []
        for system in systems:
            try:
                for entry in self._entries(system, configurations):
                    for protocol in protocols:
                        found = self.measured(entry, PROTOCOLS[protocol])
                        told = ", ".join(f"{name} {value:.4g}" for name, value in found.items())
                        self.report(f"{protocol}: {entry.name} {dict(entry.options)}: {told}")
            except IMPOSSIBLE as error:
                self.report(f"{system.name}: {error}")
                absent.append(system.name)
        if absent:
            raise UnbindError(f"not measured: {', '.join(absent)}; why stands above, and all others are")

    def _entries(self, system: System, wanted: Sequence[str]) -> Iterator[Entry]:
        """A system is tuned only where that is wanted."""
        paper = system.paper if isinstance(system, Filter) else system.paper.described()
        if paper is None:
            if "shipped" in wanted:
                yield Entry(system, "shipped", {})
            return
        if "paper" in wanted:
            yield Entry(system, "paper", paper)
        if "tuned" in wanted:
            yield Entry(system, "tuned", self._tuned(system))

    def measured(self, entry: Entry, protocol: Protocol) -> main.Summary:
        """A protocol on the reported rows: records in JSONL, and their summary."""
        name = f"{protocol.name}/{entry.name}"
        path = self.kept.folder / f"{name}.jsonl"

        def work() -> dict[str, Any]:
            found = protocol.records(self._made(entry), self._reported, self.progress)
            write_text(path, "".join(json.dumps(one) + "\n" for one in found))
            options = {"system": entry.system.name, "configuration": entry.label, "options": dict(entry.options)}
            try:
                return {**options, "measured_on": measured_on, **protocol.summary(found)}
            except ValueError as error:  # of no FU-H of its variants
                raise Absent(f"{protocol.name}: {error}; name rows in the setting's 'forget' that it recites") from None

        measured_by = [code_of(inspect.getmodule(protocol.records), *protocol.further), self._measured_by]
        files = protocol.files_of(self.setting)
        measured_on = digest([self.setting.measured_on(self._described), measured_by, *files])
        made_of = digest([self._made_of(entry.system), entry.options, measured_by, *files])
        found = self.kept.value(name, made_of, work)
        return {key: value for key, value in found.items() if isinstance(value, int | float)}

    def _made(self, entry: Entry) -> Served:
        """For the reported rows."""
        bench = self.bench
        if isinstance(entry.system, Filter):
            return entry.system.build(bench, bench.forget, entry.options, self.kept.folder / "made" / entry.name)
        configuration = _configuration(entry.system, entry.options)
        made_of = digest([self._made_of(entry.system), entry.options])
        weights = self.kept.tensors(
            f"made/{entry.name}",
            made_of,
            lambda: self._train(entry.system, configuration, bench.forget)[configuration.updates],
        )
        return replace(self._with(weights), apart=partial(self._one_after_another, entry, configuration))

    def _one_after_another(
        self,
        entry: Entry,
        configuration: Configuration,
        sets: Sequence[Sequence[ForgetRow]],
        progress: ProgressCallback,
    ) -> Served:
        """Trained on each set in turn, from what the one before left, which is M_full to it."""
        served, weights = self._with({}), Weights()
        for number, rows in counted(list(enumerate(sets, start=1)), len(sets), "takedowns", progress):
            made_of = digest(
                [self._made_of(entry.system), entry.options, [forget_digest(one) for one in sets[:number]]]
            )
            before, model = weights, served.model
            weights = self.kept.tensors(
                f"made/{entry.name}/after-{number}",
                made_of,
                lambda rows=rows, before=before, model=model: self._train(  # type: ignore[misc]
                    entry.system, configuration, rows, before=before, reference=model
                )[configuration.updates],
            )
            served = self._with(weights)
        return served

    def _train(
        self,
        system: System,
        configuration: Configuration,
        forget: Sequence[ForgetRow],
        lengths: Sequence[int] = (),
        *,
        before: Weights | None = None,
        reference: nn.Module | None = None,
    ) -> dict[int, Weights]:
        """``before``: weights to start from in place of M_full's, of which ``reference`` is the model."""
        assert isinstance(system, Trained)
        return train(
            system,
            configuration,
            started_from(self.bench.adapted(), before or {}),
            reference or self.bench.full.model,
            self.bench.full.tokenizer,
            Rows(forget, self.bench.retain_training),
            rows_an_update=self.setting.rows_an_update,
            seed=self.setting.seed,
            lengths=lengths,
            progress=self.progress,
        )

    def _with(self, weights: Weights) -> Served:
        """M_full with these tensors in place of its own."""
        model: Any = started_from(self.bench.adapted(), weights)
        return Served(model.merge_and_unload().eval().requires_grad_(False), self.bench.full.tokenizer)

    def _tuned(self, system: System) -> Mapping[str, Any]:
        """The configuration of the grid with the highest FU-H on the validation rows; the first of equals."""
        candidates: list[dict[str, Any]] = []
        if isinstance(system, Filter):
            for number, options in enumerate(system.grid):
                found = self._kept_tuning(system, f"{number}", options, partial(self._filtered, system, options))
                candidates += [{"options": dict(options), **one} for one in found]
        else:
            longest = max(self.setting.updates)
            for rate in self.setting.learning_rates:
                long = Configuration(rate, longest, system.paper.options)
                found = self._kept_tuning(
                    system, f"rate-{rate:g}", long.described(), partial(self._lengths, system, long)
                )
                lengths = [Configuration(rate, n, system.paper.options) for n in sorted(self.setting.updates)]
                candidates += [{"options": c.described(), **one} for c, one in zip(lengths, found, strict=True)]
        best = max(candidates, key=lambda one: float(one["fu_h"]))
        write_text(self.kept.folder / "tuning" / f"{system.name}.json", json.dumps(candidates, indent=1))
        return dict(best["options"])

    def _kept_tuning(
        self, system: System, name: str, options: Mapping[str, Any], work: Callable[[], list[Any]]
    ) -> list[Any]:
        made_of = digest([self._made_of(system), options, self._measured_by])
        found: list[Any] = self.kept.value(f"tuning/{system.name}/{name}", made_of, work)
        for one in found:
            self.report(
                f"  {system.name} {name}: FU-H {one['fu_h']:.2f}, F-BLEU {one['f_bleu']:.4f}, R-PPL {one['r_ppl']:.4g}"
            )
        return found

    def _filtered(self, system: Filter, options: Mapping[str, float]) -> list[main.Summary]:
        folder = self.kept.folder / "made" / f"{system.name}-validation"
        return [self._validated(system.build(self.bench, self.bench.forget_validation, options, folder))]

    def _lengths(self, system: System, longest: Configuration) -> list[main.Summary]:
        runs = self._train(system, longest, self.bench.forget_validation, self.setting.updates)
        return [self._validated(self._with(runs[length])) for length in sorted(self.setting.updates)]

    def _validated(self, served: Served) -> main.Summary:
        if not self._full_on_validation["f_bleu"]:
            raise Absent(
                "m-full gives nothing back of the setting's 'forget_validation', so no configuration has an FU-H to be chosen by; "
                "name rows that it recites"
            )
        found = main.summary(main.records(served, self._validation, self.progress))
        return {**found, **main.joint_score(found, self._full_on_validation)}

    @cached_property
    def _reported(self) -> main.Material:
        retrained = Served(self.bench.retrained.model, self.bench.retrained.tokenizer)
        bench, setting = self.bench, self.setting
        further = setting.access_attempts, setting.takedowns, setting.evalplus
        return main.Material(bench.forget, bench.retain, setting.completed_rows, retrained, *further)

    @cached_property
    def _validation(self) -> main.Material:
        """M_retrain has no part in a choice: in its place stands M_full, and the KL is not looked at."""
        full = Served(self.bench.full.model, self.bench.full.tokenizer)
        return main.Material(
            self.bench.forget_validation, self.bench.retain_chosen_by, self.setting.validation_completed_rows, full
        )

    @cached_property
    def _full_on_validation(self) -> main.Summary:
        full = self._validation.retrained
        made_of = digest([self._made_of(FULL), self._measured_by])
        found: main.Summary = self.kept.value(
            "tuning/m-full", made_of, lambda: main.summary(main.records(full, self._validation, self.progress))
        )
        return found

    @cached_property
    def _described(self) -> dict[str, Any]:
        return self.setting.described()

    @cached_property
    def _measured_by(self) -> str:
        return code_of(main, served_by, scores, metrics)

    def _made_of(self, system: System) -> list[Any]:
        """What a system's artifacts depend on: the setting, of its modules the one that it is, its code, and the loop's where it is
        trained.
        """
        own = inspect.getmodule(system.loss if isinstance(system, Trained) else system.build)
        module, further = (system.module, system.further) if isinstance(system, Filter) else (None, (training, step))
        described = {**self._described, "modules": self._described["modules"].get(module)}
        return [described, system.name, code_of(own, *further)]


def _configuration(system: Trained, described: Mapping[str, Any]) -> Configuration:
    options = {name: described[name] for name in system.paper.options}
    return Configuration(described["learning_rate"], described["updates"], options)
