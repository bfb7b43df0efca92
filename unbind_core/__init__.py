"""The method, as a library: fit an unlearning module to a forget set, and apply any number of them while a model runs.

Fitting: rows -> :func:`fit` -> :class:`UnbindModule`. Applying: modules -> :class:`ModuleBank` -> :func:`attach`, or
:class:`Intervention` for an engine that batches. This package knows nothing of HTTP or databases.

The paper, wherever this code cites a section, an equation or an appendix: Zhengyang Shan, Jiayun Xin, Yanjun Lin, Xu Qian,
Zhiang Liu, Minghui Xu, Yue Zhang, Qin Hu, Kun Li, Xiuzhen Cheng (Shandong University), "UNBIND: UNlearning By INference-time
Directional Steering for Code LLMs"; its code and data: https://anonymous.4open.science/r/UNBIND-75D0
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unbind_core.applying.attach import attach
    from unbind_core.applying.bank import ModuleBank
    from unbind_core.applying.hooks import Intervention
    from unbind_core.applying.passes import Pass
    from unbind_core.applying.selection import Selection
    from unbind_core.architecture import LoadedModel, decoder_layers, identify, load_model
    from unbind_core.errors import UnbindError
    from unbind_core.evaluation.scores import extractable
    from unbind_core.evaluation.verify import verify
    from unbind_core.fitting.corrections.reference import Reference, load_reference
    from unbind_core.fitting.fit import fit
    from unbind_core.fitting.options import FitOptions, FitReport
    from unbind_core.identity import ModelIdentity
    from unbind_core.module import UnbindModule
    from unbind_core.rows import ForgetRow, RetainRow, parse_forget, parse_retain

# Loaded on first use: whoever only reads a module file does not pay for what fitting needs.
_HOME = {
    "LoadedModel": "architecture",
    "ModelIdentity": "identity",
    "decoder_layers": "architecture",
    "identify": "architecture",
    "load_model": "architecture",
    "ModuleBank": "applying.bank",
    "Pass": "applying.passes",
    "Selection": "applying.selection",
    "UnbindError": "errors",
    "extractable": "evaluation.scores",
    "verify": "evaluation.verify",
    "FitOptions": "fitting.options",
    "FitReport": "fitting.options",
    "fit": "fitting.fit",
    "Reference": "fitting.corrections.reference",
    "load_reference": "fitting.corrections.reference",
    "Intervention": "applying.hooks",
    "attach": "applying.attach",
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
    "Pass",
    "Reference",
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
    "load_reference",
    "parse_forget",
    "parse_retain",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Import a public name from the file that defines it."""
    if name not in _HOME:
        raise AttributeError(f"module 'unbind_core' has no attribute '{name}'")
    return getattr(import_module(f"unbind_core.{_HOME[name]}"), name)
