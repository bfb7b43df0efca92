"""The cost model of a takedown: peak memory, disk and time of every stage, from a model's shape and the amounts of rows.

Memory is what the device holds at most while a stage runs, weights included: a bound, to be refused by. Time is an estimate.
Terms are named for what they stand for in the code; constants that bound the code are read from where they bound it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from unbind_core.evaluation import drafts, kept
from unbind_core.evaluation.metrics import BLEU_NEW_TOKENS
from unbind_core.fitting import network, screening
from unbind_core.fitting.auto import correction_effort, correction_units
from unbind_core.fitting.corrections import beginning, examples, leading, learning, nearsighted
from unbind_core.fitting.corrections.reference import Kind
from unbind_core.fitting.descent import step_products
from unbind_core.fitting.judge import NEW_TOKENS, SAMPLED_ROWS, thoroughly
from unbind_core.fitting.network import network_batch, network_steps, network_width
from unbind_core.fitting.options import FitOptions, possible_layers
from unbind_core.fitting.variations import LONGEST
from unbind_core.planning.amounts import Amounts
from unbind_core.planning.machine import Machine
from unbind_core.running import vocabulary
from unbind_core.running.shape import Shape

PAD = 1.1  # padded positions for a real one: batches are of like lengths
ELSEWHERE = 17  # of a row's length, the windows in which it is met elsewhere together
LEADS = 1200  # tokens of other code in front of a row in those, together
PASS, TRIAL = 4096, 2048  # positions of a batch that is captured, and of one that edits are tried on
DECODED = 16_384  # positions of a batch that is decoded
TRIED = 3  # gates that are asked about all rows, as a rule
WAYS = 4  # prompts of a row that a trial asks
GOES_ON = 0.3  # of the rows, in completions that drafts do not tell
REACHED = 0.6  # of the device's large products, by a whole pass


@dataclass(frozen=True)
class Stage:
    """``memory``: bytes at most on the device; ``disk``: bytes it leaves in the cache, at most; ``seconds``: about."""

    name: str
    memory: int
    disk: int
    seconds: float


@dataclass(frozen=True)
class Plan:
    """The stages of one takedown in their order; ``weights``: bytes that the models take, of each stage's memory."""

    stages: tuple[Stage, ...]
    weights: int

    @property
    def memory(self) -> int:
        """Bytes on the device at most."""
        return max(stage.memory for stage in self.stages)

    @property
    def disk(self) -> int:
        """Bytes of the cache at most, where it holds nothing yet."""
        return sum(stage.disk for stage in self.stages)

    @property
    def seconds(self) -> float:
        """About so long, where the cache holds nothing yet."""
        return sum(stage.seconds for stage in self.stages)

    def to_json(self) -> dict[str, Any]:
        """As dry runs and job records show it."""
        return {
            "memory_bytes": self.memory,
            "weights_bytes": self.weights,
            "disk_bytes": self.disk,
            "seconds": round(self.seconds, 1),
            "stages": [{**asdict(stage), "seconds": round(stage.seconds, 1)} for stage in self.stages],
        }


def plan_takedown(
    shape: Shape,
    amounts: Amounts,
    machine: Machine,
    options: FitOptions | None = None,
    *,
    reference: Kind = Kind.ITSELF,
    packed: bool = False,
    beside: bool = False,
) -> Plan:
    """What a takedown takes. ``reference``: what is led towards, of this shape too; ``packed``: weights are held twice, as on
    a processor that packs them; ``beside``: there are other modules in force, with which the joint cost is measured.
    """
    options = options or FitOptions()
    costs = _Costs(shape, amounts, machine, options, reference)
    held = shape.weights * (2 if packed else 1)
    both = held * (2 if costs.reference else 1)
    stages = []
    for name, working, disk, seconds in costs.stages():
        if name == "joint" and not beside:
            continue
        weights = held if name in ("check", "verify", "joint") else both
        stages.append(Stage(name, int(weights + working + machine.libraries), int(disk), seconds))
    return Plan(tuple(stages), both)


class _Costs:
    """The terms of the model; ``stages`` adds them up."""

    def __init__(self, shape: Shape, amounts: Amounts, machine: Machine, options: FitOptions, reference: Kind) -> None:
        self.shape, self.amounts, self.machine, self.options = shape, amounts, machine, options
        self.paper = options.gate != "auto"
        self.reference, self.base = not self.paper and reference is not Kind.ITSELF, reference is Kind.BASE
        self.near = not self.paper and reference is Kind.ITSELF and options.policy != "silent"
        self.layers = len(options.layers or possible_layers(options.gate, shape.layers)) if self.paper else 1
        state = shape.state * PAD * (2 if self.near else 1)  # and an early layer's
        self.retain_sample = min(options.state_bytes, 4 * amounts.retain_fit * shape.width)
        self.forget = amounts.forget * amounts.forms * state
        each = min(ELSEWHERE * amounts.forget + LEADS * amounts.forget_rows, 18 * LONGEST * amounts.forget_rows)
        self.elsewhere_tokens = each if not self.paper else 0
        self.elsewhere = min(self.elsewhere_tokens * state, screening.MOST_MET)
        self.paths = min(3 * amounts.forget * amounts.forms * shape.state * PAD, 1.5 * drafts.MOST_KEPT)

    # Memory.

    def _kept(self, tokens: float, layers: int = 1) -> tuple[float, float]:
        """States of one role: bytes that stay in memory, and bytes in files."""
        size = tokens * self.shape.state * PAD * layers
        return (size if size <= kept.MOST_RESIDENT else 0.0), size

    def _writing(self, size: float) -> float:
        return 2 * min(size, kept.FILE_BYTES)

    def _passing(self, tokens: float) -> float:
        """A pass without gradients."""
        return tokens * self.shape.forward

    def _logits(self, tokens: float, wide: float) -> float:
        """Logits of a batch: as the model makes them, once more those that are wanted, and ``wide`` copies in float32."""
        whole = tokens * self.shape.vocabulary
        part = min(whole, vocabulary.MOST_LOGITS)
        return part * ((2 if whole == part else 1) * self.shape.itemsize + 4 * wide)

    def _scoring(self, tokens: float) -> float:
        """A batch out of so many tokens is passed through, and its targets' likelihoods taken."""
        tokens = min(TRIAL, tokens * PAD)
        return self._passing(tokens) + self._logits(tokens, 1 if self.shape.itemsize == 4 else 2)

    def _comparing(self, tokens: float) -> float:
        """The same under an edit and without, and their divergences."""
        tokens = min(TRIAL, tokens * PAD)
        edits = 8 * tokens * self.shape.width * 4
        return self._passing(tokens) + self._logits(tokens, 0) + self._logits(tokens, 4) + edits

    def _decoding(self, rows: float, length: float) -> float:
        """Keys and values, some of them twice where rows leave, and the pass over the prompts."""
        together = min(DECODED, rows * (length + BLEU_NEW_TOKENS) * PAD)
        return 1.5 * together * self.shape.keys + self._passing(min(together, rows * length * PAD))

    # Time.

    def _pass(self, tokens: float, *, scored: bool = False) -> float:
        products = self.shape.body + (self.shape.head_products if scored else 0)
        return tokens * products / (REACHED * self.machine.products)

    def _decode(self, rows: float, length: float, count: int = BLEU_NEW_TOKENS) -> float:
        """So many rows, ``count`` tokens each."""
        together = max(1.0, min(rows, DECODED // (length + count)))
        step = max(
            self._pass(together, scored=True),
            (self.shape.weights + together * length * self.shape.keys) / self.machine.reads,
        )
        return self._pass(rows * length) + count * step * -(-rows // together)

    # Stages.

    def stages(self) -> Iterator[tuple[str, float, float, float]]:
        """Name, bytes beside the weights, bytes on disk, seconds."""
        a, shape = self.amounts, self.shape
        asked = self._pass(a.forget * a.forms, scored=True) + self._decode(GOES_ON * a.forget_rows * a.forms, a.longest)
        self.asking = max(self._scoring(a.forget * a.forms), self._decoding(a.forget_rows * WAYS, a.longest))
        yield "check", self.paths + self.forget + self.asking, 0.0, asked
        oracle = 64 * shape.backward + self._logits(64, 3)
        yield "self-check", oracle, 0.0, 6 * self._pass(64, scored=True)
        yield from self._paper() if self.paper else self._auto()
        if a.certificate_rows:
            inside, disk = self._retained(a.certificate, 1)
            work = self._choosing(a.certificate_rows, a.certificate)
            yield "certificate", inside + work, disk, self._completed(a.certificate_rows, a.certificate)
        (forms, on_disk), (paths, paths_disk) = self._kept(a.held * (a.forms + 1)), self._kept(a.held)
        held = forms + paths + max(self.asking, self._choosing(a.held_rows, a.held))
        again = 2 * (asked + self._decode(a.forget_rows * (1 + GOES_ON), a.longest))
        yield "verify", held, on_disk + paths_disk, again + self._completed(a.held_rows, a.held)
        tokens = min(PASS, 48 * a.forms * a.calibration / max(1, a.calibration_rows))
        both = 2 * tokens * shape.state + self._passing(tokens) + self._logits(tokens, 0) + self._logits(tokens, 4)
        yield "joint", both, 0.0, 2 * self._pass(48 * a.forms * a.calibration / max(1, a.calibration_rows), scored=True)

    def _retained(self, tokens: float, layers: int) -> tuple[float, float]:
        """States of windows and of completions of some retain rows: in memory while they are made, and on disk."""
        (windows, first), (paths, second) = self._kept(tokens * self.amounts.forms, layers), self._kept(tokens, layers)
        return windows + paths + self._writing(max(first, second)), first + second

    def _choosing(self, rows: float, tokens: float) -> float:
        """Edits are tried on rows, and those that they touch completed again."""
        return max(self._comparing(tokens * self.amounts.forms), self._decoding(rows, tokens / max(1, rows)))

    def _completed(self, rows: float, tokens: float) -> float:
        if not rows:
            return 0.0
        return self._pass(tokens * (self.amounts.forms + 1), scored=True) + self._decode(rows, tokens / rows)

    def _learning(self, batch: int, copies: int, wide: int = 1) -> float:
        """A step of a correction, and before the first the map that it begins at; of states ``wide`` times the model's."""
        width = wide * self.shape.width
        step = batch * (self.shape.vocabulary * (self.shape.itemsize + 4 * copies) + width * 4 * 10)
        return max(step, 4 * 8 * width**2)

    def _learned(self, batch: int, steps: float, wide: int = 1) -> float:
        width, units = wide * self.shape.width, correction_units(self.amounts.forget_rows)
        step = self.shape.head_products * 4 * batch + 2 * step_products(units, width)
        products = max(1.0, steps) * step + 40 * width**3
        return products / (REACHED * self.machine.products)

    def _auto(self) -> Iterator[tuple[str, float, float, float]]:
        a, shape, sample = self.amounts, self.shape, self.retain_sample
        passing = self._passing(min(PASS, 2 * a.retain_fit))
        effort = min(1.0, self.options.effort)
        if self.base or self.near:
            wide, rows, read = (2, leading.NEAR_ROWS, nearsighted.READ) if self.near else (1, leading.ROWS, 1)
            tokens = min(a.retain_fit, rows * a.calibration / max(1, a.calibration_rows))
            work = max(passing, self._learning(learning.BATCH, 5, wide))
            states = 9 * wide * tokens * shape.width  # of both models, and once more as they are put together
            seconds = (1 + read) * self._pass(tokens) + self._learned(learning.BATCH, effort * leading.STEPS, wide)
            yield "leading", 2 * states + work, wide * 2 * 8 * beginning.UNITS * shape.width, seconds
        yield "retain states", sample + self._writing(sample / 8) + passing, sample, self._pass(2 * a.retain_fit)
        retained, on_disk = self._retained(a.calibration, 1)
        length = a.calibration / max(1, a.calibration_rows)
        work = max(self._scoring(a.calibration * a.forms), self._decoding(a.calibration_rows, length))
        yield "calibration", sample + retained + work, on_disk, self._completed(a.calibration_rows, a.calibration)
        held = sample + retained - self._writing(on_disk) + self.forget + self.elsewhere
        work = max(self._scoring(a.forget * a.forms), self._passing(min(PASS, self.elsewhere_tokens)))
        seconds = self._pass(a.forget * a.forms, scored=True) + self._pass(self.elsewhere_tokens)
        yield "forget states", held + work, 0.0, seconds
        own = min(effort * examples.MOST_OWN, a.forget * a.forms)
        others = min(effort * examples.MOST_ELSEWHERE, self.elsewhere_tokens)
        if self.reference:  # what it writes in place of the rows, twice
            others += 2 * min(screening.MOST_CONTINUED, a.forget_rows * a.forms) * (screening.CONTINUED + 2)
        ours, drawn = own + others, examples.OWN * own + others
        lists, pairs = 4 * ours * shape.width, 4 * drawn * shape.width
        seconds = self._decode(GOES_ON * a.forget_rows * a.forms, a.longest)
        if self.reference:
            seconds = self._decode(a.forget_rows * WAYS, a.longest) + self._pass(ours)
        elif self.near:
            seconds += self._pass(nearsighted.READ * ours)
        yield "reference", held + self.paths + max(lists + pairs + passing, self.asking), 0.0, seconds
        held += self.paths + pairs
        batch, copies = learning.BATCH + learning.BATCH // 2, 6 if self.options.policy != "silent" else 9
        learned = self._learning(batch, copies)
        steps = effort * correction_effort(a.forget_rows) * beginning.STEPS
        yield "correction", held + learned, 0.0, self._learned(batch, steps)
        width, number = network_width(a.forget_rows), network_batch(a.forget_rows)
        # The states that scale all others, in float32, and once more while their deviation is taken.
        scaling = 2 * min(2 * network.SAMPLE, a.retain_fit) * shape.width * 4
        training = self.forget + self.elsewhere + scaling + number * shape.width * 4 * 4
        scores = 1.5 * (a.forget + a.calibration) * a.forms * a.forget_rows * 4
        step = 6.0 * number * width * (shape.width + a.forget_rows)
        step += step_products(width, shape.width) + step_products(a.forget_rows + 1, width)
        products = effort * network_steps(a.forget_rows) * step
        seconds = products / (REACHED * self.machine.products)
        yield "detector", held + max(training, scores), 0.0, seconds
        ways = self._pass(WAYS * a.forget) + self._decode(GOES_ON * WAYS * a.forget_rows, a.longest, NEW_TOKENS)
        sampled = self._decode(WAYS * min(a.forget_rows, SAMPLED_ROWS), a.longest, NEW_TOKENS)
        work = max(self._choosing(a.calibration_rows, a.calibration), self.asking)
        most = scores + max(work, learned)  # firmer corrections are learned where the first leaves too much
        yield "gates", held + most, 0.0, TRIED * ways + (thoroughly(a.forget_rows) - 1) * sampled

    def _paper(self) -> Iterator[tuple[str, float, float, float]]:
        a, shape, layers = self.amounts, self.shape, self.layers
        square = 8 * shape.width**2
        tokens = min(PASS, a.retain_fit * a.forms)
        work = tokens * (layers * shape.state + 6 * 8 * shape.width) + self._passing(tokens) + square
        products = layers * a.retain_fit * a.forms * shape.width**2
        seconds = self._pass(a.retain_fit * a.forms) + products / self.machine.products
        yield "retain states", layers * square + work, layers * square, seconds
        tokens = min(a.forget * a.forms, max(a.longest, shape.gradient_tokens))
        gradients = tokens * (shape.backward + 2 * layers * shape.state + 32 * shape.width) + self._logits(tokens, 4)
        kept_too = 2 * a.forget * a.forms * layers * shape.state * PAD / 6  # of the sixth that calibrates
        products = 2 * layers * (a.forget * a.forms * shape.width**2 + 10 * shape.width**3)
        seconds = 4 * self._pass(a.forget * a.forms, scored=True) + products / self.machine.products
        yield "forget states and gradients", (3 * layers + 6) * square + kept_too + gradients, 0.0, seconds
        every = min(shape.layers, layers + 1)  # and the last one, where it is none of them
        retained, disk = self._retained(a.calibration, every)
        held = 3 * layers * square + max(self.forget, a.longest * shape.state) * every / 6 + retained
        work = self._choosing(a.calibration_rows, a.calibration)
        yield "calibration", held + work, disk, self._completed(a.calibration_rows, a.calibration)
        trials = layers * 60  # candidates that are not screened away at once, each from its layer up
        yield "search", held + work, 0.0, trials * self._pass(1024 + a.forget / 30 * a.forms, scored=True) / 2
