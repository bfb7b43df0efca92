"""One call through the guard: who asks, which guards apply to it, and what is counted of its answer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

from fastapi import Depends, Request

from server.api.caller import Caller, charge_answers, charge_tokens, inference
from server.api.inference.call import refuse_report, rules_of
from server.api.models import SEPARATOR
from server.api.profiles import PROFILE_KEY, profile_names
from server.policy import Assigned, assign, headed, heading, requested, resolve, standing
from server.proxy.asked import Asked
from server.proxy.channel import Channel
from server.proxy.following import Following, tokens_of
from server.proxy.relay import Relay
from server.proxy.service import GuardService, guarded
from unbind_core.guard.book import GuardSet
from unbind_core.guard.index import GuardIndex
from unbind_core.guard.sent import Sent

WITHHELD = "what it says is withheld"


class Call:
    """A request on its way to the other server."""

    def __init__(self, request: Request, served: GuardService, caller: Caller) -> None:
        self.request, self.served, self.caller = request, served, caller

    def submit(self, asked: Asked, path: str) -> Relay:
        """Everything that can refuse, before the other server is asked. Raises ApiError, UnknownModule."""
        refuse_report(asked.unbind, self.caller)
        model, profile = self.model(asked.model)
        assigned = self._assigned(profile, asked.unbind.modules if asked.unbind else None)
        body = asked.passed_on(model)
        charge_answers(self.served, self.caller, asked.answers)
        following = Following(assigned.guards, asked.answers, asked.sent(), escaped=asked.escaped, told=self._told)
        headers = heading(assigned.labels)
        checked = partial(_checked, assigned.guards)
        return Relay(self.served, path, body, following, headers=headers, checked=checked, ended=self._ended)

    def model(self, name: str | None) -> tuple[str | None, str | None]:
        """The other server's name of a model, and the profile that an alias of it chooses."""
        model, separator, profile = (name or "").rpartition(SEPARATOR)
        if separator and model and profile in profile_names(self.served):
            return model, profile
        return name, None

    def _assigned(self, profile: str | None, named: list[str] | dict[str, float] | None) -> Assigned:
        served = self.served
        chosen = dict.fromkeys((profile, self.request.scope.get(PROFILE_KEY)))
        scopes, profiles, holding = rules_of(served, self.caller, [name for name in chosen if name])
        asked, guards = requested(named, headed(self.request)), served.offer.guards
        effective = resolve(asked, [*scopes, standing(served.offer.scan, guards, holding)], profiles)
        return assign(served.modules, effective, served.offer.scan, guards, holding)

    def _told(self, guard: GuardIndex) -> Mapping[str, Any]:
        """What a choice says that a guard has ended, to those who may have reports."""
        if not self.caller.may("report"):
            return {}
        return {"unbind": {"blocked": {"guard": guard.label, **self.served.offer.guards.about(guard.name)}}}

    def _ended(self, relay: Relay) -> None:
        """Count what was used: what the other server says or, where it does not, what came."""
        telemetry, following = self.served.telemetry, relay.following
        if not following.choices:
            return  # it was refused, or failed before it began
        taken = _count(following.usage.get("prompt_tokens"), tokens_of(relay.body))
        made = _count(following.usage.get("completion_tokens"), following.tokens)
        telemetry.prompt_tokens.inc(taken)
        telemetry.generated_tokens.inc(made)
        charge_tokens(self.served, self.caller, taken + made)
        route = str(getattr(self.request.scope.get("route"), "path", "unknown"))
        for choice in following.choices.values():
            telemetry.guarded(route, choice.done)


def _count(given: Any, otherwise: int) -> int:
    return given if isinstance(given, int) and 0 <= given < 2**40 else otherwise


def _checked(guards: GuardSet | None, message: str) -> str:
    """A message of the other server, which may hold what its model wrote; withheld where a guard would."""
    if guards is None:
        return message
    channel = Channel(guards, Sent(str), escaped=True)
    channel.push(message)
    channel.end()
    return WITHHELD if channel.blocked else message


async def _call(
    request: Request,
    served: Annotated[GuardService, Depends(guarded)],
    caller: Annotated[Caller, Depends(inference)],
) -> Call:
    return Call(request, served, caller)


Admitted = Annotated[Call, Depends(_call)]
