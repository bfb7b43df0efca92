"""Which modules and guards apply to a call, and why.

effective = enforced(server + key + profile) + (requested that the key allows). Requests only add: "not named" never
means "off", of two strengths the larger holds, and what a policy demands keeps the strength that policies give it.
What a policy names and the engine does not have is a 503, never an answer without it. The records of modules and
guards speak as well: an active one with a scope is enforced in it, one in shadow is measured and never applied,
whoever names it. A name stands for the module and the guard of a takedown: what is live of both applies.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from starlette.requests import HTTPConnection

from server.engine.modules import ModuleTable, unknown
from server.engine.pinned import PinnedSet
from server.errors import ApiError, invalid
from server.guards import Guards
from server.registry.store import Scan
from server.rules import MAX_MODULES, MAX_STRENGTH, Rules, WhenOpen
from unbind_core.guard.book import GuardSet

HEADER = "X-Unbind-Modules"
HEADED = 2048  # characters of what applied that an answer's header holds: proxies take some 4 KB of all headers
FIELD = "unbind.modules"
OFF = 0.0
NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)(e[-+]?\d+)?", re.ASCII | re.IGNORECASE)  # Python reads 1_0 as ten


@dataclass(frozen=True)
class Effective:
    """The answer for one call. ``required``: the names that a policy gave; ``shadow``: measured and not applied."""

    strengths: Mapping[str, float]
    required: frozenset[str]
    shadow: tuple[str, ...] = ()


@dataclass(frozen=True)
class Assigned:
    """What one call runs under: versions of modules, and guards, None where there are none."""

    modules: PinnedSet
    guards: GuardSet | None = None

    @property
    def labels(self) -> tuple[str, ...]:
        """What is applied, as answers name it; not what is only measured."""
        return (*labels(self.modules), *(self.guards.labels if self.guards else ()))


def requested(
    body: Sequence[str] | Mapping[str, float] | None = None, headers: Iterable[str] = ()
) -> Mapping[str, float]:
    """Name -> strength over body and headers, the larger where both name one; OFF where either tries to switch it off.

    A name is switched off by strength 0 or a ``-`` in front, which ``resolve`` refuses. In a header a strength follows
    the name after ``=``.
    """
    given = list(body.items()) if isinstance(body, Mapping) else [(name, 1.0) for name in body or ()]
    given += [_part(part) for header in headers for part in header.split(",") if part.strip()]
    if len(given) > MAX_MODULES:
        raise invalid(f"{FIELD}: {len(given)} names; at most {MAX_MODULES} can be on in one call", FIELD)
    found: dict[str, float] = {}
    for raw, strength in given:
        name, factor = (raw[1:].strip(), OFF) if raw.startswith("-") else (raw, strength)
        if not OFF <= factor <= MAX_STRENGTH:  # NaN as well
            raise invalid(f"{FIELD}: the strength of '{name[:80]}' must be over 0 and at most {MAX_STRENGTH:g}", FIELD)
        before = found.get(name, factor)
        found[name] = OFF if OFF in (before, factor) else max(before, factor)
    return found


def headed(call: HTTPConnection) -> list[str]:
    """The values of the header that names modules. Raises ApiError for one that is nearly called so, and for a parameter of the
    address that may be meant to name modules: ignored, they would leave them out unnoticed.
    """
    headers = [("header", name, value) for name, value in call.headers.items() if name != HEADER.lower()]
    parameters = [("parameter", name, value) for name, value in call.query_params.multi_items()]
    for kind, name, value in headers + parameters:
        plain = name.lower().replace("_", "-").removeprefix("x-")
        meant = plain.startswith("unbind") or (kind == "parameter" and plain in ("module", "modules", "profile"))
        if meant and value.strip():
            raise invalid(
                f"the {kind} {name[:64]} is not read here, and refused as it may name modules; write the header {HEADER}: NAME",
                name[:64],
                "invalid_value",
            )
    return call.headers.getlist(HEADER)


def _part(text: str) -> tuple[str, float]:
    name, equals, strength = text.strip().partition("=")
    if equals and not NUMBER.fullmatch(strength.strip()):
        raise invalid(f"{HEADER}: '{text.strip()[:80]}' is not NAME or NAME=STRENGTH, as demo-a=0.5", HEADER)
    return name.strip(), float(strength) if equals else 1.0


def resolve(asked: Mapping[str, float], scopes: Sequence[Rules] = (), profiles: Sequence[Rules] = ()) -> Effective:
    """Unite the sources. ``scopes`` hold in any case: server, key and its profile; ``profiles``: those the request chose.

    Raises ApiError: 403 for switching off what a policy demands or asking for what the key does not allow, 400 for
    switching off anything else.
    """
    strengths: dict[str, float] = {}

    def add(more: Mapping[str, float]) -> None:
        for name, strength in more.items():
            strengths[name] = max(strengths.get(name, OFF), strength)

    for scope in scopes:
        add(scope.enforced)
        add(scope.modules)
    for profile in profiles:
        add(profile.enforced)
    allowed = _allowed(scopes)
    for wanted in (*(profile.modules for profile in profiles), asked):
        for name in wanted:
            if allowed is not None and name not in allowed and name not in strengths:
                raise ApiError(
                    403,
                    f"{FIELD}: this key does not allow '{name[:80]}'; it allows {', '.join(sorted(allowed)) or 'none'}",
                    param=FIELD,
                    code="module_not_allowed",
                )
    for profile in profiles:
        add(profile.modules)
    required = frozenset(strengths)
    for name, strength in asked.items():
        if strength == OFF:
            raise _no_switching_off(name, name in required)
    # Not even raised: answers of two strengths tell what the correction adds, and so what the model says without it.
    add({name: strength for name, strength in asked.items() if name not in required})
    shadow = {name for scope in (*scopes, *profiles) for name in scope.shadow}
    return Effective(strengths, required, tuple(sorted(shadow - strengths.keys())))


def when_open(setting: WhenOpen, server: Rules, key: Rules, profiles: Iterable[Rules]) -> WhenOpen:
    """What holds for a call while a gate is open: what its key says, else the server's rules, else the setting; a profile, which
    requests may choose, only makes it stricter.
    """
    base = key.when_open or server.when_open or setting
    return max((base, *(rules.when_open or base for rules in profiles)), key=get_args(WhenOpen).index)


def standing(scan: Scan, guards: Guards, scopes: Collection[str]) -> Rules:
    """What the records demand for a call in these scopes (``global``, ``key:ID``, ``profile:NAME``)."""
    enforced = dict.fromkeys((*scan.enforced(scopes), *guards.enforced(scopes)), 1.0)
    return Rules.model_construct(modules={}, enforced=enforced, shadow=[], allowed=None)


def _allowed(scopes: Iterable[Rules]) -> Collection[str] | None:
    """What every scope allows; None where none of them limits it."""
    limits = [frozenset(scope.allowed) for scope in scopes if scope.allowed is not None]
    return frozenset.intersection(*limits) if limits else None


def _no_switching_off(name: str, required: bool) -> ApiError:
    if required:
        message = f"{FIELD}: '{name[:80]}' applies to this call by policy and cannot be switched off"
        return ApiError(403, message, param=FIELD, code="module_enforced")
    return invalid(f"{FIELD}: requests only add modules; leave '{name[:80]}' out instead", FIELD, "cannot_switch_off")


def assign(
    table: ModuleTable, effective: Effective, scan: Scan, guards: Guards, scopes: Collection[str] = ()
) -> Assigned:
    """The versions of modules and the guards to run under. What is in shadow is never applied, also where it is named; it is
    measured there, and in its scope if that is one of ``scopes``.

    Raises UnknownModule; and ApiError 503 where a name that a policy demands stands for nothing that applies, or where a module or
    a guard of any name that is demanded or asked for should be loaded and could not be.
    """
    current, book = table.current, guards.book
    absent = scan.absent.keys() | guards.absent.keys()
    shadow = scan.shadow
    fitted = {name for name in effective.strengths if name in current and name not in shadow}
    guarded = {name for name in effective.strengths if name in book.indexes and name not in guards.shadow}
    for name in sorted(effective.strengths):
        if name in effective.required and (name in absent or not (name in fitted or name in guarded)):
            raise unavailable(name)
        if name in absent:
            raise missing(name)
        if name not in current and name not in book.indexes:
            raise unknown(name, current.keys() | book.indexes.keys())
    named = (*effective.strengths, *effective.shadow)
    unapplied = {name for name in (*named, *scan.measured(scopes)) if name in current} - fitted
    counted = {name for name in (*named, *guards.measured(scopes)) if name in book.indexes} - guarded
    strengths = {name: strength for name, strength in effective.strengths.items() if name in fitted}
    return Assigned(
        table.pin({**strengths, **dict.fromkeys(sorted(unapplied), OFF)}),
        book.select(guarded, counted),
    )


def unavailable(names: str | None) -> ApiError:
    """What a policy demands is not there, or only measured; None where nobody may hear which."""
    which = (
        f"module '{names}' applies to this call by policy and is not active"
        if names
        else "an enforced module is missing"
    )
    return ApiError(
        503,
        f"{which}; nothing is served without it",
        code="module_unavailable",
        headers={"Retry-After": "10"},
    )


def missing(name: str) -> ApiError:
    """What a request names is active, as a module or as a guard, and could not be loaded."""
    return ApiError(
        503,
        f"{FIELD}: module '{name}' could not be loaded here; nothing is served without it",
        param=FIELD,
        code="module_unavailable",
        headers={"Retry-After": "10"},
    )


def labels(pinned: PinnedSet) -> tuple[str, ...]:
    """``name@digest12`` of each module that is applied; one in shadow is not."""
    return tuple(entry.label for entry in pinned.entries if pinned.strengths[entry.key] > OFF)


def heading(applied: Sequence[str]) -> dict[str, str]:
    """The answer's header of what applied: ``applied`` labels, and ``+N`` for N more than HEADED characters hold; {} for none."""
    if not applied:
        return {}
    length, count = -1, 0
    for label in applied:
        length += 1 + len(label)
        if length > HEADED:
            break
        count += 1
    more = [f"+{len(applied) - count}"] if count < len(applied) else []
    return {HEADER: ",".join([*applied[:count], *more])}
