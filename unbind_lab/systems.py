"""Every system of the lab by name, in the order of the tables: reference models, Unbind, the paper's fourteen, rivals; and those
that a file of the user's defines.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import re
import sys
from collections.abc import Sequence
from pathlib import Path

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
    for name in () if names is None else names:
        if name not in SYSTEMS:
            raise UnbindError(f"--systems: '{name}' is unknown; choose from {', '.join(SYSTEMS)}")
    return [SYSTEMS[name] for name in names] if names else list(SYSTEMS.values())


def own(path: Path) -> list[System]:
    """The systems that a Python file defines, which is run for it. Raises UnbindError, which names the file, where it fails, has
    none, or one whose name is a shipped one's or cannot be a file's.
    """
    try:
        name = f"unbind_lab_own_{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"
    except OSError as error:
        raise UnbindError(f"--own: {path} cannot be read ({error.strerror}); name a Python file") from None
    spec = importlib.util.spec_from_loader(name, importlib.machinery.SourceFileLoader(name, str(path)))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # by which its code is found, of which digests are made
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UnbindError(f"--own: {path} fails: {type(error).__name__}: {error}") from error
    values = {id(one): one for one in vars(module).values() if isinstance(one, System)}
    found = [one for one in values.values() if SYSTEMS.get(one.name) is not one]
    if not found:
        raise UnbindError(f"--own: {path} defines no system; give a Trained or a Filter a name of its own there")
    for one in found:
        if one.name in SYSTEMS:
            raise UnbindError(f"--own: {path}: '{one.name}' is a shipped system's name; give it another")
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", one.name):
            raise UnbindError(
                f"--own: {path}: '{one.name}' cannot be a file's name; use letters, digits, '.', '_' and '-'"
            )
    return found
