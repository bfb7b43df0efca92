"""What commands that load a model share: where the demo world is the default, and how rows are read.

What models need is imported where it is used, so that help texts do not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from server import demo
from unbind_core.errors import UnbindError
from unbind_core.fields import DTYPES

if TYPE_CHECKING:
    import torch

    from unbind_core import ForgetRow, LoadedModel, RetainRow

Model = Annotated[Path | None, typer.Option(help="Checkpoint folder; the demo model where none is given.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")]
FimTemplate = Annotated[
    str,
    typer.Option(
        help="Fill-in-the-middle order, <PRE>{prefix}<SUF>{suffix}<MID>; the tokenizer's where none is given."
    ),
]
T = TypeVar("T")


def dtype_of(name: str) -> torch.dtype:
    """The dtype of this name. Raises UnbindError."""
    import torch

    if name not in DTYPES:
        raise UnbindError(f"--dtype: '{name}' is unknown; choose from {', '.join(DTYPES)}")
    found: torch.dtype = getattr(torch, name)
    return found


def load(
    model: Path | None, adapter: Path | None, dtype: str = "float32", device: str = "cpu", fim_template: str = ""
) -> LoadedModel:
    """The model named, or the demo model with its memorising adapter where none is."""
    from unbind_core.architecture import load_model
    from unbind_core.encoding import use_fim_template

    if model is None:
        model, adapter = demo.BASE, adapter or demo.ADAPTER
    loaded = load_model(model, adapter, dtype=dtype_of(dtype), device=device)
    use_fim_template(loaded.tokenizer, fim_template)
    return loaded


def forget_rows(path: Path) -> list[ForgetRow]:
    """Forget rows of a JSONL file. Raises UnbindError naming --forget where it cannot be read."""
    from unbind_core.rows import parse_forget

    return _rows(parse_forget, path, "--forget")


def retain_rows(path: Path, option: str = "--retain") -> list[RetainRow]:
    """Retain rows of a JSONL file. Raises UnbindError naming the option where it cannot be read."""
    from unbind_core.rows import parse_retain

    return _rows(parse_retain, path, option)


def _rows(parse: Callable[[Path], list[T]], path: Path, option: str) -> list[T]:
    try:
        return parse(path)
    except OSError as error:
        raise UnbindError(f"{option}: {path} cannot be read ({error.strerror}); name a JSONL file of rows") from error
