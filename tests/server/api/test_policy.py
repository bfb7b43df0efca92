"""Which modules apply: every source adds, none takes away."""

from __future__ import annotations

import random
from typing import Any

import pytest
from pydantic import ValidationError

from server.errors import ApiError
from server.policy import HEADED, HEADER, heading, requested, resolve
from server.rules import Rules

NAMES = tuple("abcdefgh")


def test_the_larger_strength_holds_and_sources_unite() -> None:
    made = resolve(
        requested({"a": 0.5, "b": 2.0}, ["a=0.7, c", " d "]),
        [Rules(enforced={"b": 1.0}), Rules(enforced={"e": 0.25})],
        [Rules(modules={"c": 3.0, "f": 1.0}, enforced={"g": 1.0})],
    )
    assert made.strengths == {"a": 0.7, "b": 1.0, "c": 3.0, "d": 1.0, "e": 0.25, "f": 1.0, "g": 1.0}
    assert made.required == {"b", "c", "e", "f", "g"}


@pytest.mark.parametrize("strength", [0.1, 2.0, 10.0])
@pytest.mark.parametrize(("scope", "profile"), [(Rules(enforced=["a"]), Rules()), (Rules(), Rules(modules=["a"]))])
def test_no_request_chooses_the_strength_of_what_a_policy_demands(
    strength: float, scope: Rules, profile: Rules
) -> None:
    # Answers of two strengths would tell the difference that the correction makes.
    assert resolve({"a": strength}, [scope], [profile]).strengths == {"a": 1.0}


@pytest.mark.parametrize("named", [["-a"], {"a": 0.0}, {"a": -0.0}, ["b", "-a", "a"]])
def test_what_is_enforced_cannot_be_switched_off(named: Any) -> None:
    for scopes, profiles in (([Rules(enforced=["a"])], []), ([], [Rules(modules=["a"])])):
        with pytest.raises(ApiError) as refused:
            resolve(requested(named), scopes, profiles)
        assert (refused.value.status, refused.value.code) == (403, "module_enforced")


def test_switching_off_what_is_not_enforced_is_a_mistake_too() -> None:
    with pytest.raises(ApiError, match="leave 'a' out") as refused:
        resolve(requested(["-a"]))
    assert refused.value.status == 400


def test_a_key_limits_what_requests_add_and_nothing_else() -> None:
    key = Rules(allowed=["a"], enforced=["b"])
    assert set(resolve({"a": 1.0, "b": 1.0}, [key]).strengths) == {"a", "b"}
    for asked, profiles in (({"c": 1.0}, []), ({}, [Rules(modules=["c"])])):
        with pytest.raises(ApiError, match="does not allow 'c'") as refused:
            resolve(asked, [key], profiles)
        assert (refused.value.status, refused.value.param) == (403, "unbind.modules")
    assert set(resolve({}, [key], [Rules(enforced=["c"])]).strengths) == {"b", "c"}


def test_two_limits_allow_what_both_allow() -> None:
    with pytest.raises(ApiError):
        resolve({"a": 1.0}, [Rules(allowed=["a", "b"]), Rules(allowed=["b", "c"])])
    assert resolve({"b": 1.0}, [Rules(allowed=["a", "b"]), Rules(allowed=["b", "c"])]).strengths == {"b": 1.0}


def test_a_module_in_shadow_is_measured_unless_it_is_on() -> None:
    made = resolve({"a": 1.0}, [Rules(shadow=["a", "b"])], [Rules(shadow=["c"])])
    assert made.shadow == ("b", "c") and made.strengths == {"a": 1.0}


@pytest.mark.parametrize("header", ["a=", "a=x", "a=nan", "a=inf", "a=11", "a=-1", "a==1", "a=1_0", "a=٣"])
def test_a_bad_strength_in_a_header_is_refused(header: str) -> None:
    with pytest.raises(ApiError) as refused:
        requested((), [header])
    assert refused.value.status == 400


@pytest.mark.parametrize(
    "rules",
    [{"enforced": {"a": 0}}, {"enforced": ["../x"]}, {"modules": {"a": "much"}}, {"module": []}, {"enforced": 5}],
)
def test_bad_rules_are_refused(rules: Any) -> None:
    with pytest.raises(ValidationError):
        Rules.model_validate(rules)


def _some(rng: random.Random) -> dict[str, float]:
    return {name: rng.choice((0.25, 1.0, 3.0)) for name in rng.sample(NAMES, rng.randrange(4))}


def _attack(rng: random.Random, name: str) -> Any:
    spelling = rng.choice(
        (f"-{name}", f"- {name}", name, f"{name}=0", f"{name}=0.01", f"!{name}", f"{name}@0", f"--{name}", name.upper())
    )
    return spelling, rng.choice((0.0, -0.0, 1e-9, 1.0, -1.0, float("nan"), 10.0))


def test_no_attempt_from_any_source_leaves_an_enforced_module_out() -> None:
    rng = random.Random(0)
    answered = 0
    refused: set[int] = set()
    for _ in range(10_000):
        scopes = [
            Rules(
                enforced=_some(rng),
                modules=_some(rng),
                shadow=rng.sample(NAMES, rng.randrange(4)),
                allowed=rng.choice((None, rng.sample(NAMES, rng.randrange(8)))),
            )
            for _ in range(rng.randrange(1, 5))
        ]
        profiles = [
            Rules(enforced=_some(rng), modules=_some(rng), shadow=list(_some(rng))) for _ in range(rng.randrange(3))
        ]
        demanded = {name for rules in (*scopes, *profiles) for name in rules.enforced}
        given: dict[str, float] = {}
        for rules in (*scopes, *profiles):
            for name, strength in (*rules.enforced.items(), *rules.modules.items()):
                given[name] = max(strength, given.get(name, 0.0))
        attacks = [_attack(rng, name) for name in rng.choices(NAMES, k=rng.randrange(4))]
        body: Any = dict(attacks) if rng.random() < 0.5 else [name for name, _ in attacks]
        headers = [",".join(name for name, _ in (_attack(rng, n) for n in rng.choices(NAMES, k=2)))] * rng.randrange(2)
        try:
            made = resolve(requested(body, headers), scopes, profiles)
        except ApiError as error:
            refused.add(error.status)
            continue
        answered += 1
        assert all(made.strengths[name] == given[name] for name in demanded)
        assert demanded <= made.required and not set(made.shadow) & made.strengths.keys()
    assert answered > 1000 and refused == {400, 403}


def test_an_answers_header_names_what_a_proxy_takes_and_counts_the_rest() -> None:
    assert heading(()) == {}
    assert heading(("a@1", "b:guard@2")) == {HEADER: "a@1,b:guard@2"}
    many = tuple(f"takedown-{i}@0123456789ab" for i in range(1000))
    for count in (80, 81, 1000):  # one more than fits begins between the first two
        named = heading(many[:count])[HEADER].split(",")
        shown = [one for one in named if not one.startswith("+")]
        assert shown == list(many[: len(shown)])
        assert len(",".join(shown)) <= HEADED
        assert named[len(shown) :] == ([f"+{count - len(shown)}"] if len(shown) < count else [])
    assert len(shown) > 50
