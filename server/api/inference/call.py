"""One call for inference: who asks, through which door, for which model, and so under which modules.

What every route that generates shares, before the prompt is looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated

from fastapi import Depends, Header, Request

from server.api.caller import Caller, charge_answers, charge_tokens, inference
from server.api.inference.bodies.generation import GenerationBody
from server.api.inference.generation import Generation
from server.api.inference.prompts import Prompt
from server.api.models import check_model
from server.api.profiles import PREFIX, profile_rules
from server.engine.pinned import PinnedSet
from server.errors import ApiError
from server.policy import HEADER, pin, requested, resolve, standing, when_open
from server.registry.access import SERVER_SCOPE
from server.rules import NO_RULES, Rules, WhenOpen
from server.service import Service, service

PROFILE_KEY = "unbind.profile"  # where the middleware leaves the profile of the path


class Call:
    """A request on its way to the engine."""

    def __init__(self, request: Request, served: Service, caller: Caller) -> None:
        self.request, self.served, self.caller = request, served, caller

    def submit(self, body: GenerationBody, prompts: Sequence[Prompt], *, echo: bool = False) -> Generation:
        """Everything that can refuse, then the requests in the engine's queue."""
        options = body.unbind
        report = options is not None and options.report
        if report and not self.caller.may("report"):
            raise ApiError(
                403,
                "unbind.report: this key does not have the scope 'report'",
                param="unbind.report",
                code="missing_scope",
            )
        charge_answers(self.served, self.caller, len(prompts) * body.n)
        pinned, opening = self.modules(body.model, options.modules if options else None)
        charge = partial(charge_tokens, self.served, self.caller)
        generation = Generation(self.served, prompts, pinned, charge, when_open=opening, report=report, echo=echo)
        generation.submit(body)
        return generation

    def modules(self, model: str | None, named: list[str] | dict[str, float] | None) -> tuple[PinnedSet, WhenOpen]:
        """The modules of this call, from every source at once, and what holds where their gates are open.

        Raises ApiError, UnknownModule.
        """
        served = self.served
        chosen = dict.fromkeys((check_model(served, model), self.request.scope.get(PROFILE_KEY)))
        rules, scan = served.access.current, served.offer.scan
        key, own, fixed = self.caller.key, NO_RULES, []
        holding = [SERVER_SCOPE, *(PREFIX + name for name in chosen if name)]
        if key is not None:
            own = rules.of(f"key:{key.id}")
            fixed = [profile_rules(served, key.profile)] if key.profile else []
            holding += [f"key:{key.id}", *([PREFIX + key.profile] if key.profile else [])]
        scopes = [Rules(enforced=served.settings.enforced), rules.of(SERVER_SCOPE), own, *fixed]
        profiles = [profile_rules(served, name, asked=True) for name in chosen if name]
        asked = requested(named, self.request.headers.getlist(HEADER))
        effective = resolve(asked, [*scopes, standing(scan, holding)], profiles)
        opening = when_open(served.settings.when_open, rules.of(SERVER_SCOPE), own, [*fixed, *profiles])
        return pin(served.engine.modules, effective, scan.shadow, scan.absent), opening


async def _call(
    request: Request,
    served: Annotated[Service, Depends(service)],
    caller: Annotated[Caller, Depends(inference)],
    x_unbind_modules: Annotated[  # noqa: ARG001 - read from the request, where it may stand several times
        list[str] | None, Header(description="module names with commas between, NAME or NAME=STRENGTH")
    ] = None,
) -> Call:
    return Call(request, served, caller)


Admitted = Annotated[Call, Depends(_call)]
