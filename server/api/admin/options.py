"""The options of a takedown, checked against the model, the scopes there are and each other."""

from __future__ import annotations

import time
from typing import Any

from server.api.admin.bodies import TakedownOptions
from server.api.profiles import unreached
from server.base_service import BaseService
from server.errors import ApiError, invalid
from unbind_core.architecture import LoadedModel
from unbind_core.fitting.options import possible_layers

_OF_FITS = {"layers", "seed", "gate", "policy", "budgets", "effort", "override", "joins"}


def checked_options(served: BaseService, options: TakedownOptions) -> dict[str, Any]:
    """The options as the worker reads them: plain values, times as seconds. Raises ApiError 400 naming the field."""
    _check_guard(options)
    if options.protect != "guard":
        _check_fit(served, options)
    if options.scope is not None and (why := unreached(served, options.scope)):
        remedy = "make the key or the profile first, or give another scope"
        raise _wrong("options.scope", f"{why}, so that '{options.scope}' binds no request; {remedy}")
    plain = options.model_dump(exclude={"dry_run"}, exclude_defaults=True, exclude_none=True)
    for field in ("effective_at", "expires_at"):
        if (at := getattr(options, field)) is not None:
            plain[field] = at.timestamp()
    if options.effective_at is not None and options.activation != "auto":
        raise _wrong("options.effective_at", "goes with activation 'auto'; otherwise activate when it is due")
    if plain.get("expires_at", float("inf")) <= max(time.time(), plain.get("effective_at", 0.0)):
        raise _wrong("options.expires_at", "lies before the module would be active; give a later time")
    return plain


def _check_guard(options: TakedownOptions) -> None:
    if options.protect == "module" and options.guard is not None:
        raise _wrong("options.guard", "goes with protect 'both' or 'guard'; leave it out, or change options.protect")
    if options.protect == "guard":
        meant = options.model_dump(include=_OF_FITS, exclude_defaults=True, exclude_none=True)
        if meant:
            raise _wrong(
                f"options.{min(meant)}", "says how a module is fitted; leave it out, or set options.protect to 'both'"
            )


def _check_fit(served: BaseService, options: TakedownOptions) -> None:
    count = fitted_model(served).identity.num_layers
    if any(layer >= count for layer in options.layers or []):
        raise _wrong("options.layers", f"the model has layers 0 to {count - 1}")
    possible = possible_layers(options.gate, count)
    if not set(options.layers or []) <= set(possible):
        stands = f"gate '{options.gate}' stands at {', '.join(map(str, possible))} of {count} layers; leave layers out"
        raise _wrong("options.layers", stands)
    if options.policy == "rewrite" and options.gate != "auto":
        raise _wrong("options.policy", f"gate '{options.gate}' knows silent alone; use gate 'auto'")
    if options.effort != 1 and options.gate != "auto":
        raise _wrong("options.effort", f"gate '{options.gate}' trains nothing; leave it out, or use gate 'auto'")
    if options.gate == "paper-strict" and options.budgets is not None:
        raise _wrong(
            "options.budgets", "gate 'paper-strict' holds the paper's own; leave them out, or use gate 'paper'"
        )


def _wrong(field: str, message: str) -> ApiError:
    return invalid(f"{field}: {message}", field, "invalid_value")


def fitted_model(served: BaseService) -> LoadedModel:
    """The model that modules are fitted for. Raises ApiError where there is none."""
    if served.loaded is None:
        text = "options.protect: this server has no model, so that no module can be fitted; give 'guard'"
        raise ApiError(400, text, param="options.protect", code="no_model")
    return served.loaded
