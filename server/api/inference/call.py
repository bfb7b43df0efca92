"""One call for inference: who asks, through which door, for which model, and so under which modules.

What every route that generates shares, before the prompt is looked at.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated

from fastapi import Depends, Header, Request

from server.api.caller import Caller, charge_answers, charge_tokens, inference
from server.api.inference.bodies.forms import Wanted
from server.api.inference.bodies.generation import GenerationBody, UnbindOptions
from server.api.inference.generation import Asked, Generation
from server.api.inference.prompts import Prompt, check_scores
from server.api.models import check_model
from server.api.profiles import PROFILE_KEY, profile_rules
from server.base_service import BaseService
from server.engine.grammars import Grammar, GrammarError, GrammarsBusy
from server.errors import ApiError, invalid
from server.exporting.requests import TRACE_KEY
from server.policy import Assigned, assign, headed, requested, resolve, standing, when_open
from server.registry.access import PROFILE_SCOPE, SERVER_SCOPE
from server.rules import NO_RULES, Rules, WhenOpen
from server.service import Service, service
from unbind_core.guard.escapes import Reading


class Call:
    """A request on its way to the engine."""

    def __init__(self, request: Request, served: Service, caller: Caller) -> None:
        self.request, self.served, self.caller = request, served, caller
        self._form = ""  # the field that asked for a grammar

    async def grammar(self, wanted: Wanted | None) -> Grammar | None:
        """The grammar of the form that an answer must have. Raises ApiError naming the field where it cannot be had."""
        if wanted is None:
            return None
        self._form = wanted.field
        try:
            return await self.served.engine.grammars.compiled(wanted.form, self.caller.owner)
        except GrammarError as error:
            raise invalid(f"{wanted.field}: {error}", wanted.field, "invalid_grammar") from None
        except GrammarsBusy as busy:
            raise ApiError(429, str(busy), code="queue_full", headers={"Retry-After": "2"}) from None

    def submit(
        self,
        body: GenerationBody,
        prompts: Sequence[Prompt],
        *,
        echo: bool = False,
        grammar: Grammar | None = None,
        shown: frozenset[int] = frozenset(),
        readings: tuple[Callable[[], Reading], ...] = (),
    ) -> Generation:
        """Everything that can refuse, then the requests in the engine's queue. ``grammar``, ``shown``, ``readings``: see
        ``GenerationRequest``.
        """
        options = body.unbind
        refuse_report(options, self.caller)
        charge_answers(self.served, self.caller, len(prompts) * body.n)
        field = "logprobs" if getattr(body, "prompt_logprobs", None) is None else "prompt_logprobs"
        check_scores(prompts, body.n, body.sampling(0, 0, echo).prompt_logprobs, field)
        asked = time.perf_counter()
        assigned, opening = self.modules(body.model, options.modules if options else None)
        answered = time.perf_counter()
        charge = partial(charge_tokens, self.served, self.caller)
        generation = Generation(
            self.served,
            prompts,
            assigned,
            charge,
            when_open=opening,
            report=options is not None and options.report,
            told=self.caller.may("report"),
            route=getattr(self.request.scope.get("route"), "path", "unknown"),
            echo=echo,
            asked=Asked(grammar, self._form, shown, readings),
            owner=self.caller.owner,
        )
        if (trace := self.request.scope.get(TRACE_KEY)) is not None:
            trace.policy, trace.generation = (asked, answered), generation
        generation.submit(body)
        return generation

    def modules(self, model: str | None, named: list[str] | dict[str, float] | None) -> tuple[Assigned, WhenOpen]:
        """The modules and guards of this call, from every source at once, and what holds where their gates are open.

        Raises ApiError, UnknownModule.
        """
        served = self.served
        chosen = dict.fromkeys((check_model(served, model), self.request.scope.get(PROFILE_KEY)))
        scan, guards = served.offer.scan, served.offer.guards
        scopes, profiles, holding = rules_of(served, self.caller, [name for name in chosen if name])
        asked = requested(named, headed(self.request))
        effective = resolve(asked, [*scopes, standing(scan, guards, holding)], profiles)
        opening = when_open(served.settings.when_open, scopes[1], scopes[2], [*scopes[3:], *profiles])
        return assign(served.engine.modules, effective, scan, guards, holding), opening


def rules_of(served: BaseService, caller: Caller, chosen: Sequence[str]) -> tuple[list[Rules], list[Rules], list[str]]:
    """The rules that hold for a caller (of the settings, the server, the key, its profile), those of the profiles that a request
    has ``chosen``, and the scopes of all of them. Raises ApiError where a profile is not there.
    """
    rules, key, own, fixed = served.access.current, caller.key, NO_RULES, []
    holding = [SERVER_SCOPE, *(PROFILE_SCOPE + name for name in chosen)]
    if key is not None:
        own = rules.of(f"key:{key.id}")
        fixed = [profile_rules(served, key.profile)] if key.profile else []
        holding += [f"key:{key.id}", *([PROFILE_SCOPE + key.profile] if key.profile else [])]
    scopes = [Rules(enforced=served.settings.enforced), rules.of(SERVER_SCOPE), own, *fixed]
    return scopes, [profile_rules(served, name, asked=True) for name in chosen], holding


def refuse_report(options: UnbindOptions | None, caller: Caller) -> None:
    """Raise ApiError 403 where a report is asked for with a key that may have none."""
    if options is not None and options.report and not caller.may("report"):
        text = "unbind.report: this key does not have the scope 'report'"
        raise ApiError(403, text, param="unbind.report", code="missing_scope")


async def _call(
    request: Request,
    served: Annotated[Service, Depends(service)],
    caller: Annotated[Caller, Depends(inference)],
    x_unbind_modules: Annotated[  # noqa: ARG001 - read from the request, where it may stand several times
        str | None, Header(description="module names with commas between, NAME or NAME=STRENGTH")
    ] = None,
) -> Call:
    return Call(request, served, caller)


Admitted = Annotated[Call, Depends(_call)]
