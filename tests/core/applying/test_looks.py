"""How near gates come and in which requests they open, against a count of every position by itself."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from tests.core.applying.test_bank import D, module
from unbind_core.applying.bank import ModuleBank
from unbind_core.applying.gates import activation
from unbind_core.applying.looks import BOUNDARIES, Requests
from unbind_core.applying.passes import Pass


def looking(*modules: object, requests: int = 8) -> ModuleBank:
    bank = ModuleBank(requests=requests)
    for one in modules:
        bank.add(one)
    return bank


def below(scores: Tensor) -> tuple[int, ...]:
    return tuple(int((scores < bound).sum()) for bound in BOUNDARIES)


def test_scores_are_counted_in_units_of_the_threshold_where_rows_asked() -> None:
    one, other = module("a", tau=0.3, s_ref=-0.2), module("b", seed=1, tau=0.7)
    bank = looking(one, other)
    selection = bank.select([{"a": 1.0}, {"a": 0.0, "b": 1.0}])
    h = torch.randn(2, 50, D, generator=torch.Generator().manual_seed(0))
    real = torch.rand(2, 50, generator=torch.Generator().manual_seed(1)) > 0.2
    selection.edit(1, h, Pass(real=real))
    selection.edit(1, h[:, :1], Pass(phase="decode"))
    looks = bank.looks()
    expected = {"a": [h[0][real[0]], h[1][real[1]], h[0, :1], h[1, :1]], "b": [h[1][real[1]], h[1, :1]]}
    for owner in (one, other):
        states = torch.cat(expected[owner.name])
        scores = (states @ owner.w - owner.s_ref) / owner.tau
        look = looks[owner.name]
        assert look.below == below(scores) and look.positions == len(states)
        opened = sum(count for _, count in bank.counts()[owner.name].values())
        assert (
            look.positions - look.below[BOUNDARIES.index(1.0)]
            == opened
            == int((activation(states, owner.w[None], torch.tensor([owner.s_ref])) >= owner.tau).sum())
        )
    assert looks["a"].positions == sum(count for count, _ in bank.counts()["a"].values())


def test_a_request_is_counted_once_however_many_passes_it_takes() -> None:
    bank = looking(module("a", w=torch.eye(D)[0], tau=0.5, s_ref=0.0), requests=2)
    h = torch.zeros(2, 3, D)
    names = iter(range(1000))
    opened = 0
    for _ in range(200):  # many more than there are rows
        pair = [next(names), next(names)]
        selection = bank.select([{"a": 1.0}, {"a": 1.0}])
        for phase, opens in (("prefill", False), ("decode", True), ("decode", True), ("prefill", True)):
            states = h.clone()
            states[1, 1, 0] = float(opens)
            selection.edit(1, states, Pass(phase=phase, requests=bank.requests.rows(pair)))
        opened += 1
    assert bank.looks()["a"].requests == opened == 200


def test_flat_states_tell_their_requests_one_by_one() -> None:
    bank = looking(module("a", w=torch.eye(D)[0], tau=0.5, s_ref=0.0))
    selection = bank.select([{"a": 1.0}, {}])
    h = torch.zeros(6, D)
    h[[1, 4, 5], 0] = 1.0
    which = torch.tensor([0, 0, 1, 1, 2, 2])
    rows = torch.tensor([0, 0, 0, 0, 1, 1])  # the third asks for nothing
    requests = bank.requests.rows(["x", "y", "z"])[which]
    quiet = torch.tensor([True, True, True, True, True, True])
    selection.edit(1, h, Pass(rows=rows, requests=requests, counts=quiet, decoding=which > 0))
    assert bank.looks()["a"].requests == 1 and bank.looks()["a"].positions == 4


def test_what_is_not_counted_is_not_looked_at_either() -> None:
    bank = looking(module("a", w=torch.eye(D)[0], tau=0.5, s_ref=0.0))
    selection = bank.select([{"a": 1.0}])
    h = torch.ones(1, 4, D)
    selection.edit(1, h, Pass(counts=torch.zeros(1, 4).bool(), requests=bank.requests.rows(["w"])))
    assert bank.looks()["a"] == ((0,) * len(BOUNDARIES), 0, 0)


def test_a_bank_that_nobody_looks_at_tells_nothing() -> None:
    bank = ModuleBank()
    bank.add(module("a"))
    assert bank.requests is None and bank.looks() == {}


@pytest.mark.parametrize("inference", [True, False])
def test_looks_outlive_selections_and_modules(inference: bool) -> None:
    bank = looking(module("a"))
    with torch.inference_mode(inference):
        for seed in range(70):  # more slots than the tables have at first
            bank.add(module("a", seed=seed))
            bank.select([{"a": 1.0}]).edit(1, torch.randn(1, 3, D), Pass(requests=bank.requests.rows([seed])))
            bank.remove("a")
    assert bank.looks()["a"].positions == 210 == bank.counts()["a"]["prefill"][0]


def test_passes_side_by_side_each_get_rows_for_their_requests() -> None:
    """As many new requests as there are rows left, of two threads at once."""
    requests = Requests(8, torch.device("cpu"), lambda: None)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as pool:

            def each(thread: int) -> None:
                for number in range(12_000):
                    assert len(set(requests.rows([(thread, number), (thread, -number - 1)]).tolist())) == 2

            list(pool.map(each, range(2)))
    finally:
        sys.setswitchinterval(before)


def test_room_that_another_pass_has_made_meanwhile_is_not_made_again() -> None:
    """Else the rows of that pass would go to others while it runs."""
    asked: list[Tensor] = []

    def settle() -> None:
        if not asked:
            asked.append(torch.empty(0))
            asked[0] = requests.rows(["p", "q"])  # as another thread does it

    requests = Requests(8, torch.device("cpu"), settle)
    for number in range(7):
        requests.rows([number])
    requests.rows(["x", "y"])
    assert torch.equal(requests.rows(["p", "q"]), asked[0])
