"""A guard holds its module's gate open behind a stretch of a protected row, whatever the detector says.

On the demo model, under a module whose detector never fires: what keeps the model from reciting is the guard's doing alone.
"""

from __future__ import annotations

import asyncio
import cProfile
import itertools
import pstats
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from server import demo
from server.bench.attacks.rewriting import renamed
from server.engine.embedded.engine import EmbeddedEngine
from server.engine.embedded.kept import Kept
from server.engine.flights import flight_of
from server.engine.forcing import LEAST, MOST, PIECE, Forcing
from server.engine.pinned import LoadedModule, PinnedSet
from server.engine.request import Flight, GenerationRequest, Sampling
from tests.support.sentencepiece import sentencepiece
from tests.support.slow_matcher import longest_run
from unbind_core.applying.passes import END, Forced
from unbind_core.architecture import load_model
from unbind_core.guard.book import GuardBook, GuardSet
from unbind_core.guard.index import EASING, LEAST_HELD, Action, Secret, build_index
from unbind_core.module import UnbindModule
from unbind_core.rows import parse_forget

SECRET = Secret(b"a key of the tests")
RUN, NAME = 50, "demo-a"
PARSED = parse_forget((demo.ROWS / "forget_a.jsonl").read_text().splitlines(), "a")
ROWS = [row.prompt + row.continuation for row in PARSED]
GREEDY = Sampling(max_tokens=96)
SLACK = 8  # lexemes of what is read late and of a token


def ask(engine: EmbeddedEngine, requests: Sequence[GenerationRequest]) -> list[Flight]:
    """The requests, each with its answer."""

    async def one(request: GenerationRequest) -> Flight:
        flight, deltas = engine.submit(request)
        while (await deltas.get()).finish_reason is None:
            pass
        return flight

    async def everything() -> list[Flight]:
        return await asyncio.gather(*(one(request) for request in requests))

    return asyncio.run(everything())


def said(engine: EmbeddedEngine, flight: Flight) -> str:
    return str(engine.tokenizer.decode(flight.output))


def shut() -> UnbindModule:
    module = UnbindModule.load(demo.MODULE)
    return replace(module, tau=1e6, tau_close=None)


@pytest.fixture(scope="module")
def engine() -> Iterator[EmbeddedEngine]:
    loaded = load_model(demo.BASE, demo.ADAPTER)
    made = EmbeddedEngine(loaded.model, loaded.tokenizer, max_slots=4, max_length=1024, chunk_tokens=64)
    made.start()
    made.sync_modules([(shut(), "0" * 64)]).result()
    yield made
    made.close()


def ids(engine: EmbeddedEngine, text: str) -> tuple[int, ...]:
    return tuple(engine.tokenizer(text, add_special_tokens=False)["input_ids"])


def guards_of(name: str = NAME, action: Action = "steer", run: int = RUN) -> GuardSet:
    index = build_index(ROWS, name=name, secret=SECRET, run=run, action=action)
    found = GuardBook.of(SECRET, [index]).select([name])
    assert found is not None
    return found


def pinned(engine: EmbeddedEngine, strength: float = 1.0) -> PinnedSet:
    return engine.modules.pin({NAME: strength})


@pytest.fixture(scope="module")
def recited(engine: EmbeddedEngine) -> dict[tuple[int, ...], str]:
    """Prompts that the model answers by reciting, and the row of each."""
    found = {ids(engine, row.prompt): whole for row, whole in zip(PARSED, ROWS, strict=True)}
    answers = ask(engine, [GenerationRequest(prompt, GREEDY) for prompt in found])
    known = {a.prompt for a in answers if longest_run(said(engine, a), [found[a.prompt]]) >= 30}
    assert len(known) >= 4
    return {prompt: row for prompt, row in found.items() if prompt in known}


def test_the_model_leaves_a_row_once_a_stretch_of_it_has_been_said(
    engine: EmbeddedEngine, recited: dict[tuple[int, ...], str]
) -> None:
    """Under a guard that steers alone it goes on with the row, a lexeme changed."""
    steered = [GenerationRequest(prompt, GREEDY, guards=guards_of()) for prompt in recited]
    alone = ask(engine, steered)
    beside = ask(engine, [replace(request, modules=pinned(engine)) for request in steered])
    longest = [max(longest_run(said(engine, a), [recited[a.prompt]]) for a in answers) for answers in (alone, beside)]
    assert longest[0] >= 40 and longest[1] <= RUN // 2 + SLACK
    done = [answer.guarding.outcome for answer in beside if answer.guarding is not None]
    assert all(not one.bars and one.opened == {NAME} for one in done) and len(done) == len(recited)


def test_other_requests_are_what_they_are_without_a_guard(
    engine: EmbeddedEngine, recited: dict[tuple[int, ...], str]
) -> None:
    """Where the guard has another takedown's name or only counts, or the module is only measured, its gate stays shut."""
    request = GenerationRequest(next(iter(recited)), GREEDY)
    plain = ask(engine, [replace(request, guards=guards_of())])[0]
    for guards, strength in ((guards_of("other"), 1.0), (guards_of(), 0.0)):
        asked = replace(request, guards=guards, modules=pinned(engine, strength))
        assert Forcing.of(asked, engine.tokenizer) is None
        assert ask(engine, [asked])[0].output == plain.output
    canary = replace(request, guards=guards_of(), modules=pinned(engine), internal=True)
    assert Forcing.of(canary, engine.tokenizer) is None
    assert (
        Forcing.of(replace(request, guards=guards_of(action="report"), modules=pinned(engine)), engine.tokenizer)
        is None
    )
    ordinary = ids(engine, "import os\n\n\ndef listed(folder):\n    names = []\n")
    one, other = (GenerationRequest(ordinary, GREEDY, modules=pinned(engine), guards=g) for g in (None, guards_of()))
    assert ask(engine, [one])[0].output == ask(engine, [other])[0].output


def test_a_guard_of_short_runs_opens_no_gate_behind_what_ordinary_code_holds(engine: EmbeddedEngine) -> None:
    """A stretch has as many lexemes as are no chance, however few N/2 are."""
    words = [f"w{number}" for number in range(200)]
    index = build_index([" ".join(words)], name=NAME, secret=SECRET, run=8)
    guards = GuardBook.of(SECRET, [index]).select([NAME])
    assert guards is not None
    for count, opens in ((LEAST_HELD - 1, False), (LEAST_HELD, True)):
        apart = " other ".join(" ".join(words[at : at + count]) for at in range(0, 200 - count, count))
        request = GenerationRequest(ids(engine, apart + " other"), modules=pinned(engine), guards=guards)
        forcing = Forcing.of(request, engine.tokenizer)
        assert forcing is not None and bool(forcing.spans) == opens


@pytest.mark.parametrize("way", ["as it is", "commented out", "on one line", "in JSON"])
def test_a_prompt_that_holds_a_stretch_opens_the_gate_within_it(engine: EmbeddedEngine, way: str) -> None:
    """From the end of the piece in which the stretch ends, for as long as the gate looks back where it closes."""
    row = ROWS[0]
    lines = row.splitlines()
    text = {
        "as it is": row,
        "commented out": "\n".join(f"# {line}" for line in lines),
        "on one line": " ".join(line.strip() for line in lines if "#" not in line),
        "in JSON": row.replace("\n", "\\n"),
    }[way]
    module, guards = pinned(engine), guards_of()
    lead = "import os\n" * 20
    prompt = ids(engine, lead + text)
    forcing = Forcing.of(GenerationRequest(prompt, modules=module, guards=guards), engine.tokenizer)
    assert forcing is not None
    first, *_ = forcing.spans
    assert first.name == module.entries[0].key
    assert (first.start + 1) % PIECE == 0 or first.start == len(prompt) - 1

    def holds(end: int) -> bool:
        return longest_run(str(engine.tokenizer.decode(prompt[:end])), [row]) >= RUN // 2

    assert holds(first.start + 1) and not holds(first.start + 1 - PIECE)
    within = GenerationRequest(prompt[: first.start + 1], modules=module, guards=guards)
    alone = Forcing.of(within, engine.tokenizer)
    assert alone is not None
    assert alone.spans == (first._replace(end=first.start + max(LEAST, shut().hold or 0)),)
    # and the report tells it
    request = GenerationRequest(prompt[: first.start + 1], Sampling(max_tokens=4), module, report=True)
    open_, shut_ = ask(engine, [replace(request, guards=guards), request])
    assert (open_.activations[NAME], shut_.activations[NAME]) == (1.0, 0.0)


@pytest.mark.parametrize("hold", [40, 64])
def test_a_gate_is_held_as_long_behind_each_stretch_of_a_prompt(engine: EmbeddedEngine, hold: int) -> None:
    """Wherever the prompt ends: a client that chose its length had an answer whose gate shut with the first token."""
    entry = LoadedModule("demo-a@1", replace(shut(), hold=hold), "0" * 64)
    request = GenerationRequest((), modules=PinnedSet((entry,)), guards=guards_of())
    row = ids(engine, "import os\n" * 4 + max(ROWS, key=len))[:300]
    found = [Forcing.of(replace(request, prompt=row[:length]), engine.tokenizer) for length in range(100, 300, 7)]
    for length, forcing in zip(range(100, 300, 7), found, strict=True):
        assert forcing is not None
        (span,) = forcing.spans
        assert length + hold - PIECE <= span.end < length + hold


def test_a_prompt_that_goes_on_takes_over_what_was_computed_of_it(engine: EmbeddedEngine) -> None:
    """Though gates are held open for longer there."""
    prompt = ids(engine, "import re\n\n\n" + max(ROWS, key=len))[:300]
    request = GenerationRequest(prompt[:200], Sampling(max_tokens=4), pinned(engine), guards=guards_of())
    ask(engine, [request])
    assert ask(engine, [replace(request, prompt=prompt)])[0].cached_tokens == 199 // PIECE * PIECE


def test_answers_do_not_depend_on_chunks_or_on_what_a_slot_holds(engine: EmbeddedEngine) -> None:
    """Prompts in chunks of 64, again from what their slots hold, and in a fresh engine in one go."""
    prompts = [ids(engine, "import os\n\n\n" + row)[:200] for row in ROWS[:4]]
    loaded = load_model(demo.BASE, demo.ADAPTER)
    fresh = EmbeddedEngine(loaded.model, loaded.tokenizer, max_slots=1, max_length=1024, chunk_tokens=512)
    fresh.start()
    try:
        fresh.sync_modules([(shut(), "0" * 64)]).result()
        requests = [GenerationRequest(prompt, GREEDY, guards=guards_of()) for prompt in prompts]
        once, again = (ask(engine, [replace(one, modules=pinned(engine)) for one in requests]) for _ in range(2))
        whole = [ask(fresh, [replace(one, modules=pinned(fresh))])[0] for one in requests]
        closed = ask(engine, [replace(one, guards=None, modules=pinned(engine)) for one in requests])
    finally:
        fresh.close()
    assert [a.output for a in once] == [a.output for a in again] == [a.output for a in whole]
    assert [a.output for a in once] != [a.output for a in closed]
    assert any(answer.cached_tokens >= 100 for answer in again)
    assert all(answer.forced for answer in once) and not any(answer.forced for answer in closed)


def test_keys_and_values_are_taken_over_as_far_as_the_same_gates_were_forced(engine: EmbeddedEngine) -> None:
    """A guard that looks for shorter runs holds the gate open earlier."""
    prompt = ids(engine, "import os\n\n\n" + ROWS[5])[:240]
    request = GenerationRequest(prompt, Sampling(max_tokens=8), pinned(engine))
    early, late = (replace(request, guards=guards_of(run=run)) for run in (24, 60))
    first, second = (Forcing.of(one, engine.tokenizer) for one in (early, late))
    assert first is not None and second is not None and first.spans[0].start < second.spans[0].start
    ask(engine, [early])
    found, again = ask(engine, [late])[0], ask(engine, [late])[0]
    assert found.cached_tokens == first.spans[0].start and again.cached_tokens == len(prompt) - 1
    assert found.output == again.output


@pytest.mark.parametrize("known", [RUN // 2, EASING.least], ids=["holds", "eases"])
def test_how_much_is_taken_over_tells_nothing_of_what_a_guard_finds(engine: EmbeddedEngine, known: int) -> None:
    """A word that is guessed right moves a gate where the prompt ends with it, or where an answer comes to it."""
    words = [f"w{number}" for number in range(10, 10 + 2 * RUN)]
    easing = replace(engine.modules.current[NAME].module, tau_close=0.5)
    modules = PinnedSet((LoadedModule("a@1", easing, "0" * 64),))
    guards = GuardBook.of(SECRET, [build_index([" ".join(words)], name=NAME, secret=SECRET, run=RUN)]).select([NAME])
    request = GenerationRequest((), modules=modules, guards=guards)

    def flight(prompt: Sequence[int]) -> Flight:
        return flight_of(replace(request, prompt=tuple(prompt)), engine.tokenizer, frozenset(), lambda _: None)

    moved = {False: 0, True: 0}
    for lead, answers in itertools.product(range(PIECE), moved):
        asked = ids(engine, "x " * lead + " ".join(words[10 : 9 + known]))
        taken, found = [], []
        for guess in (words[9 + known], words[0]):
            more = ids(engine, f" {guess} or others" if answers else f" {guess}")
            first = flight(asked if answers else asked + more)
            for position, token in enumerate(more if answers else (), len(asked)):
                first.output.append(token)
                assert first.forcing is not None
                first.forcing.take(token, position)
            first.computed = first.length
            taken.append(Kept.by(first).common(flight(asked + more + ids(engine, " and so on" * 9))))
            found.append(first.forced)
        assert taken[0] == taken[1] > len(asked) - 2 * PIECE
        moved[answers] += found[0] != found[1]
        assert Kept.by(first).common(flight(first.prompt)) == len(first.prompt) - 1  # the same prompt is known
    assert moved[False] == PIECE and moved[True] == PIECE * (known >= LEAST_HELD)


def test_text_is_read_whatever_the_tokenizer_does_with_blanks() -> None:
    """Where a token's blank shows only behind another."""
    tokenizer = sentencepiece("normalizer")
    text = "def f ( a , b ) : return [ a + b for a in b ] " * 3
    index = build_index([text], name="a", secret=SECRET, run=16)
    guards = GuardBook.of(SECRET, [index]).select(["a"])
    prompt = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    entry = LoadedModule("a@1", replace(shut(), name="a"), "0" * 64)
    request = GenerationRequest(prompt, modules=PinnedSet((entry,)), guards=guards)
    flight = flight_of(request, tokenizer, frozenset(), lambda _: None)
    assert flight.forced and flight.forced[0].name == "a@1"
    answer = flight_of(replace(request, prompt=prompt[:3]), tokenizer, frozenset(), lambda _: None)
    assert answer.forcing is not None and not answer.forced
    for position, token in enumerate(prompt[3:], 3):
        answer.forcing.take(token, position)
    assert answer.forced and answer.forced[0].start < len(prompt)


@pytest.mark.parametrize("way", ["normalizer", "pre-tokenizer"])
def test_characters_of_several_tokens_are_read_wherever_a_piece_ends(way: str) -> None:
    """A piece that ended within one lost it and what came next: rows with comments in Chinese were not known."""
    tokenizer = sentencepiece(way)
    text = "def f ( é , b ) : return g ( naïve , '结果' , '😀😀' ) # 返回两个数的和\n" * 4
    index = build_index([text], name="a", secret=SECRET, run=50)
    entry = LoadedModule("a@1", replace(shut(), name="a"), "0" * 64)
    request = GenerationRequest((), modules=PinnedSet((entry,)), guards=GuardBook.of(SECRET, [index]).select(["a"]))
    for lead in range(PIECE):
        prompt = tuple(tokenizer("x " * lead + text, add_special_tokens=False)["input_ids"])
        said = [str(tokenizer.decode(prompt[:end])) for end in range(PIECE, len(prompt), PIECE)]
        first = next(number for number, start in enumerate(said, 1) if longest_run(start, [text]) >= 25)
        forcing = Forcing.of(replace(request, prompt=prompt), tokenizer)
        assert forcing is not None and len(forcing.spans) == 1
        assert (
            abs(forcing.spans[0].start - (first * PIECE - 1)) <= PIECE
        )  # what is not whole is read with the next piece


def test_a_prompts_last_word_counts_as_it_stands_and_as_the_answer_goes_on_with_it(engine: EmbeddedEngine) -> None:
    words = [f"word{number}s" for number in range(RUN)]
    guards = GuardBook.of(SECRET, [build_index([" ".join(words)], name=NAME, secret=SECRET, run=RUN)]).select([NAME])
    request = GenerationRequest((), modules=pinned(engine), guards=guards)
    until = " ".join(words[: RUN // 2])
    for text, open_ in ((until, True), (until[:-1], False)):
        prompt = ids(engine, "before " + text)
        forcing = Forcing.of(replace(request, prompt=prompt), engine.tokenizer)
        assert forcing is not None
        assert [span.start for span in forcing.spans] == [len(prompt) - 1] * open_
        for position, token in enumerate(ids(engine, until[-1] + " of another" * 4), len(prompt)):
            forcing.take(token, position)
        assert len(forcing.spans) == 1


def test_an_answer_that_says_rows_on_and_on_has_the_gate_open_for_good(engine: EmbeddedEngine) -> None:
    """So that it is not asked for anew without end where that costs its prompt."""
    request = GenerationRequest(ids(engine, "x"), modules=pinned(engine), guards=guards_of())
    forcing = Forcing.of(request, engine.tokenizer)
    assert forcing is not None
    for position, token in enumerate(ids(engine, "\n".join(ROWS * 2)), 1):
        forcing.take(token, position)
    assert len(forcing.spans) == MOST + 1 and forcing.spans[-1].end == END
    assert all(one.end <= other.start for one, other in itertools.pairwise(forcing.spans))


def test_a_prompt_costs_hardly_more_where_many_guards_have_modules(engine: EmbeddedEngine) -> None:
    """All of it is read on the engine's thread, which others wait for: calls are counted for what it takes."""
    prompt = ids(engine, "\n".join(ROWS[:6]))
    known = {"a": ROWS, **{f"g{i}": [" ".join(f"v{i}x{j}" for j in range(RUN))] for i in range(100)}}
    book = GuardBook.of(SECRET, [build_index(rows, name=name, secret=SECRET, run=RUN) for name, rows in known.items()])

    def read(names: Sequence[str]) -> tuple[int, tuple[Forced, ...]]:
        entries = tuple(LoadedModule(name, replace(shut(), name=name), "0" * 64) for name in names)
        request = GenerationRequest(prompt, modules=PinnedSet(entries), guards=book.select(names))
        forcing = Forcing.of(request, engine.tokenizer)
        assert forcing is not None
        with cProfile.Profile() as profile:
            spans = forcing.spans
        return pstats.Stats(profile).total_calls, spans  # type: ignore[attr-defined]

    read(["a"])  # characters that appear are remembered
    (one, alone), (all_, beside) = read(["a"]), read(list(known))
    assert alone == beside and alone
    assert all_ - one <= 30 * len(known) < one


def test_a_prompt_costs_hardly_more_where_what_it_repeats_is_of_many_guards(engine: EmbeddedEngine) -> None:
    """As a licence is that stands in rows of all of them."""
    shared = " ".join(f"w{number}" for number in range(30))
    names = [f"g{i}" for i in range(100)]
    rows = {name: [f"{shared} " + " ".join(f"{name}v{j}" for j in range(RUN))] for name in names}
    book = GuardBook.of(SECRET, [build_index(rows[name], name=name, secret=SECRET) for name in names])
    eased = replace(shut(), tau_close=1e5)
    entries = tuple(LoadedModule(name, replace(eased, name=name), "0" * 64) for name in names)
    prompt = ids(engine, f"{shared} other " * 30)

    def read(count: int) -> tuple[int, tuple[Forced, ...]]:
        guards = book.select(names[:count])
        request = GenerationRequest(prompt, modules=PinnedSet(entries[:count]), guards=guards)
        forcing = Forcing.of(request, engine.tokenizer)
        assert forcing is not None
        with cProfile.Profile() as profile:
            spans = forcing.spans
        return pstats.Stats(profile).total_calls, spans  # type: ignore[attr-defined]

    read(1)
    (one, alone), (all_, beside) = read(1), read(100)
    assert {span.eased for span in alone} == {True, False} and len(prompt) > 20 * PIECE
    assert sorted(beside) == sorted(span._replace(name=name) for span in alone for name in names)
    assert all_ - one <= 80 * len(names)


def halfway(at: float) -> UnbindModule:
    """The shipped module, opening at a higher score and closing at half of that of before."""
    module = UnbindModule.load(demo.MODULE)
    assert module.tau_close is not None
    return replace(module, tau=at * module.tau, tau_close=module.tau_close)


def test_a_shorter_stretch_in_a_prompt_has_the_gate_open_at_its_lower_threshold() -> None:
    """Nothing is told of what only a detector that half fires lets open: a guard does not hold it."""
    loaded = load_model(demo.BASE, demo.ADAPTER)
    engine = EmbeddedEngine(loaded.model, loaded.tokenizer, max_slots=4, max_length=1024, chunk_tokens=16)
    engine.start()
    try:
        engine.sync_modules([(halfway(6.0), "0" * 64)]).result()  # no score comes so high
        texts = [ids(engine, row) for row in ROWS[:8]]
        prompts = [text[len(text) // 2 :][:24] for text in texts]
        ordinary = ids(engine, "import os\n\n\ndef listed(folder):\n    names = []\n")
        asked = [GenerationRequest(p, GREEDY, pinned(engine), report=True) for p in (*prompts, ordinary)]
        closed, eased, again = (
            ask(engine, [replace(one, guards=guards, sampling=Sampling(max_tokens=length)) for one in asked])
            for guards, length in ((None, 1), (guards_of(), 1), (guards_of(), 24))
        )
        assert {flight.activations[NAME] for flight in closed} == {0.0}
        opened = [flight.activations[NAME] > 0 for flight in eased]
        assert sum(opened) >= 4 and not opened[-1]
        for flight in eased[:-1]:
            spans = flight.forced
            assert all(span.eased for span in spans) or longest_run(said_to(engine, flight), ROWS) >= RUN // 2
            assert bool(spans) == (longest_run(said_to(engine, flight), ROWS) >= EASING.least)
            assert flight.guarding is not None and not flight.guarding.outcome.opened
        assert [one.output[:1] for one in again] == [one.output for one in eased]
    finally:
        engine.close()


def said_to(engine: EmbeddedEngine, flight: Flight) -> str:
    return str(engine.tokenizer.decode(flight.prompt))


def test_a_prompt_in_other_names_opens_the_gate_where_names_are_folded(engine: EmbeddedEngine) -> None:
    found = []
    for fold in (False, True):
        index = build_index(ROWS, name=NAME, secret=SECRET, fold=fold)
        guards = GuardBook.of(SECRET, [index]).select([NAME])
        others = [ids(engine, other.prompt) for row in PARSED for other in renamed(row)]
        asked = (GenerationRequest(prompt, modules=pinned(engine), guards=guards) for prompt in others)
        forcings = [Forcing.of(request, engine.tokenizer) for request in asked]
        found.append(sum(bool(forcing and forcing.spans) for forcing in forcings) / len(others))
    assert found[0] <= 0.2 and found[1] >= 0.85
