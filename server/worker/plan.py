"""Which stages a job goes through, what share of its time each takes, and which results end it early.

Shared by the worker, which holds no tensors, and by the child process that runs the stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from server.registry.joining import joined_by
from server.registry.tables import JobKind
from unbind_core.evaluation.bounds import told

# Share of the whole job's time, as measured on the demo world; progress is reported in these proportions.
PLANS: Mapping[JobKind, Mapping[str, float]] = {
    JobKind.TAKEDOWN: {"check": 0.08, "fit": 0.68, "verify": 0.20, "joint": 0.03, "publish": 0.01},
    JobKind.VERIFY: {"verify": 1.0},
    JobKind.ADOPT: {"adopt": 0.6, "verify": 0.33, "joint": 0.05, "publish": 0.02},
    JobKind.ACTIVATE: {"joint": 1.0},
    JobKind.PREPARE: {"prepare": 1.0},
}

PATIENCE_SECONDS = 60.0  # how long a job waits for a module store that does not answer

NOTHING_TO_REMOVE = "nothing_to_remove"
NOT_ADOPTED = "not_adopted"
MAKING = ("fit", "adopt")  # the stages that leave a module
CALIBRATED = "calibrated"
SHORT = "short"
OVER_BUDGET = "over_joint_budget"
UNSETTLED = "joint_unsettled"  # the modules in force changed whenever the joint cost was measured
MEASUREMENTS = 4  # of it, where they do


@dataclass(frozen=True)
class Task:
    """A job as its child gets it. ``done``: finished stage -> {"folder", "files", "result"}; ``folder`` is this attempt's."""

    job_id: str
    kind: JobKind
    name: str
    forget_digest: str
    options: dict[str, Any]
    folder: str
    done: dict[str, dict[str, Any]]
    module: dict[str, Any] | None = None  # the record of the module the job is about
    others: list[dict[str, Any]] = field(default_factory=list)  # the records of the modules in force
    rows: str = ""  # the file of the forget rows
    replaces: list[str] = field(default_factory=list)  # the takedowns in whose modules' place its own is to be

    def beside(self, fingerprint: str) -> list[dict[str, Any]]:
        """Of ``others`` those that the module's cost is measured with: of the same model, and neither versions of the same name nor
        what it is to stand in for.
        """
        stays = [other for other in self.others if other["takedown_id"] not in self.replaces]
        return [other for other in stays if other["name"] != self.name and other["fingerprint"] == fingerprint]

    @property
    def measures_jointly(self) -> bool:
        """Whether the joint cost decides on the activation."""
        asked = self.options.get("activation", "auto") == "auto" and not self.options.get("override")
        return self.kind == JobKind.ACTIVATE or asked

    @property
    def todo(self) -> list[str]:
        """The stages that are left, none where a finished one has ended the job."""
        if any(ends(stage, finished["result"]) for stage, finished in self.done.items()):
            return []
        return [stage for stage in PLANS[self.kind] if stage not in self.done]


def ends(stage: str, result: Mapping[str, Any]) -> str | None:
    """The outcome with which a stage's result ends the whole job, None where the job goes on."""
    if stage == "check" and not result["memorised"]:
        return NOTHING_TO_REMOVE
    if stage == "fit" and result["outcome"] not in (CALIBRATED, SHORT):
        return str(result["outcome"])
    if stage == "adopt" and not result["adopted"]:
        return NOT_ADOPTED
    return None


def remark(results: Mapping[str, Mapping[str, Any]]) -> str:
    """What there is to know of a module although it was made, "" where nothing is."""
    fit, said = results.get("fit") or results.get("adopt") or {}, []
    if failed := fit.get("failed"):
        said.append(f"not adopted, as on the model that runs here: {'; '.join(failed)}; fit the forget set again on it")
    if fit.get("outcome") == SHORT:
        missed = (fit.get("selected") or {}).get("missed") or ()
        said.append(
            "short: the module is within its budgets, but misses its aim" + (f": {', '.join(missed)}" if missed else "")
        )
    if (certificate := fit.get("certificate") or {}).get("over"):
        said.append(f"certificate: {told(certificate)}")
    return "; ".join(said)


def progress_of(kind: JobKind, stage: str, within: float) -> float:
    """Progress of the whole job, from 0 to 1, where ``within`` of a stage is done."""
    shares = PLANS[kind]
    names = list(shares)
    return sum(shares[name] for name in names[: names.index(stage)]) + shares[stage] * within


def withheld(results: Mapping[str, Mapping[str, Any]], options: Mapping[str, Any], unsettled: str = "") -> str:
    """Why a module that was made is not to become active by itself, "" where it may; ``unsettled``: why its joint cost is not
    known.
    """
    joint = results.get("joint")
    if joint is not None and not joint["within"]:
        return _over(joint)
    if joined_by(options) and (results.get("fit") or {}).get("outcome") == SHORT:
        return "not in force: it is short, and the modules that it joins hold; activate it to have it in their place"
    if unsettled:
        return (
            f"not in force: {unsettled}, after the joint cost was measured {MEASUREMENTS} times; activate it "
            "when no other takedown is about to end"
        )
    return ""


def _over(result: Mapping[str, Any]) -> str:
    """In one sentence, which pair is over the budget and by how much."""
    budget = result["budgets"]
    worst = result["pairs"][0]
    kl, nll, every = (
        "no number" if cost is None else f"{cost:{form}}"  # as JSON has what overflowed
        for cost, form in ((worst["kl"], ".4f"), (worst["nll_increase"], "+.4f"), (result["kl"], ".4f"))
    )
    return (
        f"modules {' and '.join(worst['modules'])} together: retain KL {kl} (budget {budget['kl']}), NLL "
        f"{nll} (budget {budget['nll']}); all {len(result['modules'])} active ones: KL {every}. "
        "Activate it with override, or have one module in place of small ones: unbind takedown join"
    )
