"""What whoever posts a takedown is warned of: what they may not have meant, told in its answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from server.api.admin.bodies import TakedownFields
from server.api.admin.intake import Intake
from server.api.admin.joined import missed_by_rules
from server.base_service import BaseService
from server.registry.lifecycle import InForce, bound
from server.registry.tables import Kind
from unbind_core.guard.index import RUN

# Of one module: what is warned of without a guard, and what held in every attack (docs/benchmarks/gates.md).
MANY_ROWS, PART_ROWS = 60, 40
MOST_NAMED = 5


@dataclass(frozen=True)
class Asked:
    """A takedown as it was asked for. ``options``: as the worker reads them; ``posted``: digest of a body that joins others."""

    fields: TakedownFields
    options: dict[str, Any]
    intake: Intake
    posted: str = ""


def warnings_of(asked: Asked, guard: Mapping[str, Any] | None) -> list[str]:
    """What whoever posts may not have meant. ``guard``: the facts of the one that was made."""
    options, warnings = asked.fields.options, []
    if guard is None and options.gate == "auto" and len(asked.intake.rows) > MANY_ROWS:
        warnings.append(
            f"rows: one module of {len(asked.intake.rows)} rows without a guard holds less where somebody asks from within a row; "
            f"leave options.protect out, or post takedowns of {PART_ROWS} rows or so, as `unbind takedown submit --split "
            f"{PART_ROWS}` does"
        )
    if options.scope is None:
        makes = "the module" if guard is None else "the guard" if options.protect == "guard" else "module and guard"
        warnings.append(
            f"options.scope: none was given, so {makes} will be available and not enforced, binding "
            f"{bound(None)}. To enforce give 'global', 'profile:NAME' or 'key:ID'"
        )
    if guard is None and options.protect is None:
        holds = "only what it joins holds" if options.joins else "nothing holds"
        warnings.append(
            f"options.protect: no row has the {RUN} lexemes (words and punctuation) of a run, so that there is no guard, and "
            f"{holds} before the module is active; give options.guard.secrets where they are secrets, as keys, or a smaller "
            "options.guard.run"
        )
    if short := asked.intake.short:
        more = f" and {len(short) - MOST_NAMED} more" if len(short) > MOST_NAMED else ""
        named = ", ".join(short[:MOST_NAMED]) + more
        warnings.append(f"file: a file of one short line makes no row: {named}; give as rows what matters of them")
    if guard is not None and options.activation != "auto":
        warnings.append(
            f"options.activation: with '{options.activation}' the guard holds nothing until somebody activates it: "
            f"unbind module activate guard:{asked.fields.name}"
        )
    if guard is not None and guard.get("secrets") and asked.intake.cut:
        warnings.append(
            f"rows: {asked.intake.cut} were given as one text and cut at a quarter of it: what stands before the cut is not "
            f"guarded, be it the secret, and {guard['run']} letters and digits in a row of all that stands behind it are, be it "
            "anybody's code; give 'prompt' and 'continuation', which is the secret alone"
        )
    if guard is not None and guard["too_short"]:
        unit = "letters and digits" if guard.get("secrets") else "lexemes"
        warnings.append(
            f"options.guard.run: {guard['too_short']} of {guard['rows'] + guard['too_short']} rows have fewer than "
            f"{guard['run']} {unit}, so the guard does not hold them; give a smaller run where they matter"
        )
    return warnings


def superseding_of(served: BaseService, fields: TakedownFields) -> list[str]:
    """What is live under the name now: it will bind others, or keeps the new version out of shadow."""
    scope, protect, warnings = fields.options.scope, fields.options.protect, missed_by_rules(served, fields)
    modules = served.registry.modules
    superseded = modules.live(served.model_fingerprint) if protect != "guard" else []
    superseded += modules.live_guards() if protect != "module" else []
    for record in superseded:
        if record["name"] != fields.name:
            continue
        what = f"{'the guard ' if record['kind'] == Kind.GUARD else ''}'{fields.name}'"
        if fields.options.activation == "shadow":
            warnings.append(
                f"options.activation: version {record['version']} of {what} is {record['state']}, and one version of a name is "
                "loaded at a time, so the new one will be calibrated and measures nothing; suspend that one first, or give "
                "another name"
            )
        elif record["in_force"] == InForce.ENFORCED and record["scope"] != scope:
            warnings.append(
                f"options.scope: version {record['version']} of {what} is enforced and binds {bound(record['scope'])}; "
                f"the version that supersedes it will bind {bound(scope)}"
            )
        if parts := ", ".join(served.registry.left(record["id"], fields.options.joins)):
            warnings.append(
                f"options.joins: version {record['version']} of {what} stands in for {parts}, and the version that supersedes it "
                f"will not, as it does not join it: then these are active again beside it; name '{fields.name}' in options.joins"
            )
        if record.get("secrets") and not (fields.options.guard is not None and fields.options.guard.secrets):
            warnings.append(
                f"options.guard.secrets: version {record['version']} of {what} guards secrets letter by letter, and the version "
                "that supersedes it will not; give it again where the rows are secrets"
            )
    return warnings
