"""What a correction is learned from beside the rows: what the reference writes in their place."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import log_softmax

from tests.support import memorising
from unbind_core import FitOptions, LoadedModel, load_model
from unbind_core.applying.corrections import corrected
from unbind_core.fitting.context import Context
from unbind_core.fitting.corrections.examples import NO_ROW, examples
from unbind_core.fitting.corrections.learning import learn
from unbind_core.fitting.corrections.reference import Kind, Reference, last_logits
from unbind_core.fitting.corrections.states import Met
from unbind_core.fitting.fit import context_of
from unbind_core.fitting.screening import CONTINUED, Screening
from unbind_core.progress import silent
from unbind_core.rows import ForgetRow, RetainRow
from unbind_core.running.capture import capture_states
from unbind_core.running.generation import Sampling, complete
from unbind_core.windows import batches, forget_prompt

FORGET = [ForgetRow(row["prompt"], row["continuation"]) for row in memorising.forget_rows()]
RETAIN = [RetainRow(row["text"]) for row in memorising.retain_rows()]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(memorising.train(tmp_path_factory.mktemp("memorised") / "tiny"))


@pytest.fixture(scope="module")
def context(loaded: LoadedModel) -> Context:
    options = FitOptions(effort=0.1)
    return context_of(
        loaded.model, loaded.tokenizer, FORGET, RETAIN, (), "m", loaded.identity, options, silent, cache=None
    )


@pytest.fixture(scope="module")
def fresh(loaded: LoadedModel) -> Reference:
    torch.manual_seed(5)
    return Reference(Kind.NAMED, type(loaded.model)(loaded.model.config).eval())  # type: ignore[call-arg, operator]


@pytest.fixture(scope="module")
def continued(context: Context, fresh: Reference) -> list[Met]:
    return Screening(context).continued(fresh)


def test_each_prompt_is_continued_by_the_reference_once_greedily_and_once_by_chance(
    context: Context, fresh: Reference, continued: list[Met]
) -> None:
    assert fresh.model is not None
    prompts = [forget_prompt(context.tokenizer, row, form)[0] for row in FORGET for form in context.forms]
    end = context.tokenizer.eos_token_id
    greedy = complete(fresh.model, prompts, Sampling(CONTINUED), pad=context.pad, end=end)
    assert len(continued) == 2 * len(prompts)
    for prompt, output in zip(prompts, greedy, strict=True):
        ours = [one.window for one in continued if one.window.ids[: one.window.first_target] == tuple(prompt)]
        texts = [window.ids[len(prompt) :] for window in ours]
        ended = () if len(output) == CONTINUED else (end,)
        assert (*output, *ended) in texts and len(set(texts)) > 1
    for one in continued:  # from the state that says what comes first, up to the last that is followed
        assert one.at.tolist() == list(range(one.window.first_target - 1, len(one.window.ids) - 1))


def test_the_states_of_what_stands_before_them_are_let_go(continued: list[Met]) -> None:
    assert all(one.states.untyped_storage().nbytes() == one.states.nbytes for one in continued)


def test_their_states_are_those_of_the_model_that_is_fitted(context: Context, continued: list[Met]) -> None:
    some = continued[:3]
    for batch in batches([one.window for one in some], context.pad):
        states = capture_states(context.model, batch, [2])[2]
        for window, own in zip(batch.windows, states, strict=True):
            (found,) = (one for one in some if one.window == window)
            apart = (found.states.float() - own[found.at]).abs().mean()  # taken roughly
            assert float(apart) < 0.05
            assert float(own[found.at].abs().mean()) > 0.2


def test_a_model_that_is_its_own_reference_writes_nothing(context: Context) -> None:
    assert Screening(context).continued(Reference()) == []


def test_what_the_reference_wrote_is_not_made_less_likely(
    loaded: LoadedModel, context: Context, fresh: Reference, continued: list[Met]
) -> None:
    """A row's own token is to be less likely than the reference has it, and others are as it has them."""
    retained = torch.cat([one.states for one in continued])[:64]
    shares = []
    for as_row in (False, True):
        generator = torch.Generator().manual_seed(0)
        met, more = ([*continued], []) if as_row else ([], [*continued])
        found = examples(loaded.model, met, fresh, pad=context.pad, continued=more, generator=generator)
        assert bool((found.following == NO_ROW).all()) == (not as_row)
        correction = learn(
            loaded.model, found, retained, fresh, margin=3.0, units=48, effort=0.3, retain=0.0, generator=generator
        )
        follows = torch.cat([torch.tensor(one.window.ids)[one.at + 1] for one in continued])
        states = torch.cat([one.states for one in continued]).float()
        with torch.no_grad():
            changed = corrected(states, torch.ones(len(states)), *correction.parts)
            after = log_softmax(last_logits(loaded.model)(changed), -1)
        shares.append(float(after.gather(1, follows[:, None]).exp().mean()))
    assert shares[1] < 0.7 * shares[0]
