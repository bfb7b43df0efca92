"""The method, as a library: fit an unlearning module to a forget set, and apply any number of them while a model runs.

Fitting: rows -> :func:`fit` -> :class:`UnbindModule`. Applying: modules -> :class:`ModuleBank` -> :func:`attach`, or
:class:`Intervention` for an engine that batches. This package knows nothing of HTTP or databases.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unbind_core.architecture import LoadedModel, ModelIdentity, decoder_layers, identify, load_model
    from unbind_core.bank import ModuleBank, Selection
    from unbind_core.errors import UnbindError
    from unbind_core.evaluation import extractable, verify
    from unbind_core.fitting import fit
    from unbind_core.hooks import Intervention, attach
    from unbind_core.module import UnbindModule
    from unbind_core.rows import ForgetRow, RetainRow, parse_forget, parse_retain

# Loaded on first use: whoever only reads a module file does not pay for what fitting needs.
_HOME = {
    "LoadedModel": "architecture",
    "ModelIdentity": "architecture",
    "decoder_layers": "architecture",
    "identify": "architecture",
    "load_model": "architecture",
    "ModuleBank": "bank",
    "Selection": "bank",
    "UnbindError": "errors",
    "extractable": "evaluation",
    "verify": "evaluation",
    "FitOptions": "options",
    "FitReport": "options",
    "fit": "fitting",
    "Intervention": "hooks",
    "attach": "hooks",
    "UnbindModule": "module",
    "ForgetRow": "rows",
    "RetainRow": "rows",
    "parse_forget": "rows",
    "parse_retain": "rows",
}

__all__ = [
    "FitOptions",
    "FitReport",
    "ForgetRow",
    "Intervention",
    "LoadedModel",
    "ModelIdentity",
    "ModuleBank",
    "RetainRow",
    "Selection",
    "UnbindError",
    "UnbindModule",
    "attach",
    "decoder_layers",
    "extractable",
    "fit",
    "identify",
    "load_model",
    "parse_forget",
    "parse_retain",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Import a public name from the file that defines it."""
    if name not in _HOME:
        raise AttributeError(f"module 'unbind_core' has no attribute '{name}'")
    return getattr(import_module(f"unbind_core.{_HOME[name]}"), name)
