"""``unbind demo``: make the demo world again from nothing but pip packages."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from server import demo
from server.cli.console import clear_errors, screen

app = typer.Typer(no_args_is_help=True, help="The demo world: small model, memorising adapter, rows.")


@app.command()
def train(
    work: Annotated[
        Path, typer.Option(help="Folder for downloads, checkpoints and the result; resumes where it stopped.")
    ] = Path(".demo-work"),
    tokens: Annotated[
        int, typer.Option(min=1, help="Tokens the base model is trained on; two cores see 6,000 a second.")
    ] = 100_000_000,
    install: Annotated[bool, typer.Option(help="Replace the shipped demo world by the result.")] = False,
) -> None:
    """Train the base model, choose the rows, train both adapters. Every stage is skipped where its result exists."""
    from transformers import AutoTokenizer

    from server.demo import adapt, corpus, pretrain, rows

    with clear_errors():
        work.mkdir(parents=True, exist_ok=True)
        corpus.build(work)
        base = pretrain.train(work, tokens)
        if not (work / "rows" / "retain_test.jsonl").exists():
            rows.build(work, AutoTokenizer.from_pretrained(work / "tokenizer"), work / "rows")
        for name, with_forget in (("adapter", True), ("retrained", False)):
            adapt.adapt(base, work / "rows", work / name, with_forget=with_forget, checkpoint=work / f"{name}.pt")
        adapt.adapt(
            base,
            work / "rows",
            work / "reference",
            with_forget=False,
            checkpoint=work / "reference.pt",
            epochs=adapt.REFERENCE_EPOCHS,
            seed=adapt.REFERENCE_SEED,
        )
        if install:
            for name in ("base", "adapter", "retrained", "reference", "rows"):
                shutil.copytree(work / name, demo.HOME / name, dirs_exist_ok=True)
    screen.print(f"done: {demo.HOME if install else work}")


@app.callback()
def group() -> None:
    """Keep ``train`` a subcommand although it is the only one."""


def register(parent: typer.Typer) -> None:
    """Add ``unbind demo``."""
    parent.add_typer(app, name="demo")
