"""What a fit of rows that were posted comes to, before it is queued: positions to forget, and what it will take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from server.api.admin.intake import Intake
from server.api.admin.options import fitted_model
from server.base_service import BaseService
from server.planning.planned import planned
from unbind_core.encoding import encode, require_known
from unbind_core.errors import DataError, UnbindError
from unbind_core.rows import ForgetRow
from unbind_core.windows import trained_positions


def positions(served: BaseService, intake: Intake) -> int:
    """Continuation tokens over all rows. Raises DataError for a row whose prompt no request could bring."""
    loaded = fitted_model(served)
    tokenizer = loaded.tokenizer
    limit = trained_positions(loaded.model) or 2**31
    texts = [(place, row.prompt + row.continuation) for place, row in zip(intake.places, intake.rows, strict=True)]
    require_known(tokenizer, loaded.model.get_input_embeddings().weight.shape[0], texts)  # type: ignore[operator]
    total = 0
    for place, row in zip(intake.places, intake.rows, strict=True):
        if len(row.prompt) > limit and (length := len(encode(tokenizer, row.prompt))) >= limit:
            raise DataError(
                f"{place}: its prompt has {length} tokens (of a row of 'text' it is the first quarter), and the model's context "
                f"{limit}; shorten the prompt, or make shorter rows of the text"
            )
        total += len(encode(tokenizer, row.continuation))
    return total


def plan_of(
    served: BaseService, rows: Sequence[ForgetRow], options: Mapping[str, Any]
) -> tuple[dict[str, Any] | None, list[str]]:
    """What the fit will take, and warnings of what stands against it; None where no fit is possible with what is set."""
    loaded = fitted_model(served)
    beside = bool(served.registry.modules.in_force())
    try:
        plan = planned(served.settings, loaded.model, loaded.tokenizer, rows, options, beside=beside).to_json()
    except UnbindError as error:
        return None, [f"plan: none can be made, and a worker with these settings will refuse the fit: {error}"]
    if plan["problem"] is None:
        return plan, []
    return plan, [
        f"plan: as this server sees it now the fit does not fit, and the worker will refuse it: {plan['problem']}"
    ]
