"""Every system of the lab by name, in the order of the tables: reference models, Unbind, the paper's fourteen, rivals."""

from __future__ import annotations

from collections.abc import Sequence

from unbind_core.errors import UnbindError
from unbind_lab.filters.conformal import CONFORMAL
from unbind_lab.filters.divergence import DIVERGENCE
from unbind_lab.filters.filter import Filter
from unbind_lab.filters.gss import GSS
from unbind_lab.filters.guard import GUARD
from unbind_lab.filters.guard_it import GUARD_IT
from unbind_lab.filters.memfree import MEMFREE
from unbind_lab.filters.models import BASE, FULL, RETRAINED
from unbind_lab.filters.prompt_filter import PROMPT_FILTER
from unbind_lab.filters.unbind import PAPER, REWRITE, SILENT, STRICT
from unbind_lab.trained.asu import ASU
from unbind_lab.trained.code_eraser import CODE_ERASER
from unbind_lab.trained.dpo import DPO
from unbind_lab.trained.flat import FLAT_KL, FLAT_TV
from unbind_lab.trained.ga import GA
from unbind_lab.trained.graddiff import GRADDIFF
from unbind_lab.trained.npo import NPO
from unbind_lab.trained.prod import PROD
from unbind_lab.trained.rmu import RMU
from unbind_lab.trained.simnpo import SIMNPO
from unbind_lab.trained.task_vector import TASK_VECTOR
from unbind_lab.trained.training import Trained

System = Trained | Filter
REFERENCES: tuple[System, ...] = (FULL, RETRAINED, BASE)
UNBIND: tuple[System, ...] = (REWRITE, SILENT, PAPER, STRICT)
BASELINES: tuple[System, ...] = (
    *(GA, GRADDIFF, NPO, SIMNPO, DPO, FLAT_KL, FLAT_TV, PROD, RMU, ASU, TASK_VECTOR, CODE_ERASER),
    *(GSS, DIVERGENCE, CONFORMAL),
)
RIVALS: tuple[System, ...] = (GUARD_IT, MEMFREE, GUARD, PROMPT_FILTER)
SYSTEMS = {system.name: system for system in (*REFERENCES, *UNBIND, *BASELINES, *RIVALS)}


def chosen(names: Sequence[str] | None) -> list[System]:
    """The systems of these names, in the order asked for; all where none are named. Raises UnbindError on an unknown one."""
    for name in names or ():
        if name not in SYSTEMS:
            raise UnbindError(f"--systems: '{name}' is unknown; choose from {', '.join(SYSTEMS)}")
    return [SYSTEMS[name] for name in names] if names else list(SYSTEMS.values())
