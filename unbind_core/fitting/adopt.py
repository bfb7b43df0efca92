"""A module of another model, dtype or quantisation, measured on this one: taken over where it holds what a fit must hold.

The detector and the correction stay as they are. What gate auto asks of a gate before it takes it (``judge.py``) is asked again of
the model as it runs: cautious estimates of the costs within the budgets, and no more left of the rows than was aimed at. Where the
gate opens too often its thresholds are raised: a fit sets them just above what retained code reached on the model that it was made
on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from unbind_core.architecture import numerics
from unbind_core.cpu.linears import packed_linears
from unbind_core.errors import DataError, ModelMismatch
from unbind_core.evaluation.scores import RowScore
from unbind_core.fitting.calibration import Budgets
from unbind_core.fitting.certificate import certify
from unbind_core.fitting.context import Context
from unbind_core.fitting.corrections.leading import led
from unbind_core.fitting.corrections.reference import Reference
from unbind_core.fitting.fit import context_of
from unbind_core.fitting.judge import Cost, Judge, Remainder
from unbind_core.fitting.options import FitOptions, Target
from unbind_core.fitting.retained import calibration, contradicting_paths
from unbind_core.fitting.screening import forget_states
from unbind_core.identity import ModelIdentity
from unbind_core.module import UnbindModule
from unbind_core.progress import ProgressCallback, silent
from unbind_core.rows import ForgetRow, RetainRow, forget_digest, retain_digest

RAISED = (1.0, 1.1, 1.25, 1.5)  # times the thresholds, the first that holds


@dataclass(frozen=True)
class Adoption:
    """``module``: for this model, with what was measured; None where it does not hold, for the reasons ``failed``."""

    module: UnbindModule | None
    failed: list[str]
    measured: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """As a job's result holds it."""
        return {"adopted": self.module is not None, "failed": self.failed, **self.measured}


@dataclass(frozen=True)
class _Tried:
    """A module as it was measured; ``remainder`` None where its costs are over the budgets."""

    times: float
    module: UnbindModule
    cost: Cost
    remainder: Remainder | None
    failed: list[str]


def adopt(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    module: UnbindModule,
    forget: Sequence[ForgetRow],
    retain: Sequence[RetainRow],
    *,
    retain_calibration: Sequence[RetainRow] = (),
    identity: ModelIdentity,
    reference: Reference | None = None,
    before: Sequence[RowScore] | None = None,
    progress: ProgressCallback = silent,
    cache: Path | None = None,
) -> Adoption:
    """Measure ``module`` on a model that it was not fitted on, by the rule of a fit; arguments as for :func:`fit`.

    ``forget`` are the very rows that it was fitted on. No gradients are needed. The module that is taken over has a digest of its
    own, and ``measured["adopted"]`` says from which it came, what that one was fitted on, and how far thresholds were raised.
    Raises ModelMismatch where the model's sizes are others, DataError where the rows are, or the module is of this model already,
    or is the paper's, which has no aim to hold it to.
    """
    _check(module, identity, numerics(model), forget)
    context = context_of(
        model,
        tokenizer,
        forget,
        retain,
        retain_calibration,
        module.name,
        identity,
        _options(module),
        progress,
        cache,
    )
    context = replace(context, before=before)
    with packed_linears(model), led(context, reference or Reference()) as towards:
        return _measured(context, module, towards)


def _measured(context: Context, module: UnbindModule, reference: Reference) -> Adoption:
    left_out = context.contradicting(["retain_calibration"])
    retain, completions = calibration(context)
    if left_out:
        retain, completions = (
            retain.without(left_out),
            completions.without(contradicting_paths(context, completions)),
        )
    judge = Judge(context, retain, completions, forget_states(context), reference)
    tried = list[_Tried]()
    for times in RAISED:
        tried.append(_tried(context, judge, module, times))
        if tried[-1].remainder is not None:
            break  # within the budgets: higher thresholds would forget less
    found = tried[0] if tried[-1].failed else tried[-1]
    measured: dict[str, Any] = {
        "gate": "network",
        "layer": module.layer,
        "cost": asdict(found.cost),
        "forget_open_rate": judge.forget_open_rate(found.module),
        "aim": asdict(judge.aim),
        "correction": {"reference": reference.to_json()},
        "retain_left_out": [retain_digest(context.retain[i]) for i in left_out],
    }
    if found.remainder is not None:
        measured["forgot"] = asdict(found.remainder)
    if found.failed:
        return Adoption(None, found.failed, measured)
    if (certificate := certify(context, found.module, left_out)) is not None:
        measured["certificate"] = certificate
    measured["adopted"] = {
        "from": module.digest,
        "model": {"fingerprint": module.model.fingerprint, "name": module.model.name},
        "calibrated": dict(module.calibrated),
        "thresholds_raised": found.times,
    }
    return Adoption(replace(found.module, **context.here(), measured=measured), [], measured)


def _tried(context: Context, judge: Judge, module: UnbindModule, times: float) -> _Tried:
    """The module with thresholds so many times as far above s_ref."""
    close = None if module.tau_close is None else times * module.tau_close
    module = replace(module, tau=times * module.tau, tau_close=close)
    cost = judge.cost(module)
    if failed := cost.over(context.options.limits):
        return _Tried(times, module, cost, None, failed)
    remainder = judge.remainder(module, range(len(context.forget)), thorough=True)
    return _Tried(times, module, cost, remainder, judge.aim.missed(remainder))


def _check(
    module: UnbindModule, identity: ModelIdentity, running: Mapping[str, Any], forget: Sequence[ForgetRow]
) -> None:
    if (module.model.hidden_size, module.model.num_layers) != (identity.hidden_size, identity.num_layers):
        raise ModelMismatch(
            f"module '{module.name}' is for states {module.model.hidden_size} wide after {module.model.num_layers} layers, and "
            f"'{identity.name}' has {identity.hidden_size} and {identity.num_layers}: no other model's module can hold here; fit "
            "the forget set on this one"
        )
    if module.detector != "network" or module.correction == "push":
        raise DataError(
            f"module '{module.name}' was made by the paper's gate, which has no aim that it could be held to here; fit the forget "
            "set again on the service as it runs"
        )
    if module.model.fingerprint == identity.fingerprint and module.in_numerics(running):
        raise DataError(
            f"module '{module.name}' is of this model already: there is nothing to adopt; leave --adopt out to measure it again"
        )
    if forget_digest(forget) != module.forget_digest:
        raise DataError(
            f"module '{module.name}': these are not the rows that it was fitted on; give the rows of digest "
            f"{module.forget_digest[:12]}"
        )


def _options(module: UnbindModule) -> FitOptions:
    """What the fit that made the module was asked for, as far as it says what is acceptable and on which rows."""
    known = {of.name for of in fields(Target)}
    default, said = FitOptions(), module.settings
    target = {name: value for name, value in dict(said.get("target") or {}).items() if name in known}
    return FitOptions(
        gate="auto",
        policy=module.policy,
        layers=(module.layer,),
        forms=module.forms,
        seed=int(said.get("seed", default.seed)),
        budgets=Budgets(**module.budgets),
        target=Target(**target),
        retain_limit=said.get("retain_limit"),
        max_window=int(said.get("max_window", default.max_window)),
    )
