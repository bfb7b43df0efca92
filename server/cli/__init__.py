"""The command line ``unbind``: a file for each group of commands, each with a ``register`` that adds them here.

What models need is imported when a command that loads one runs, so that the others and the help texts do not wait for it.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from importlib import import_module
from pathlib import Path

import typer

from server.cli.console import show_error
from server.collector import spare_what_stays
from unbind_core.cpu.allocator import keep_freed_memory
from unbind_core.errors import UnbindError

GROUPS = (
    "serve",
    "guard",
    "worker",
    "settings",
    "fit",
    "verify",
    "bench",
    "bench.complete",
    "bench.cpu",
    "bench.gate",
    "bench.takedown",
    "bench.fleet",
    "bench.stored",
    "bench.fuzz",
    "bench.attack",
    "bench.guard",
    "bench.leaked",
    "bench.engines",
    "bench.scale",
    "bench.step",
    "demo",
    "lab",
    "takedown.commands",
    "module",
    "key",
    "audit",
    "evidence",
    "db",
)

# What a disk says that takes no more; where a file is not named, it is the one that standard output goes to.
NOWHERE_TO_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

app = typer.Typer(
    name="unbind",
    help="An inference server for code models with built-in unlearning filters.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Entry point of ``unbind``."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the server starts processes after tokenizing
    # Threads that spin while they wait starve whatever shares the cores: a fit beside a server ran ten times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # oneDNN keeps a program for each number of rows that a weight was multiplied with, half a megabyte each: a thousand, and
    # a thousand more in each thread. Steps of answers need about a hundred; a prompt's number of rows hardly ever comes again.
    for kept in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(kept, "256")
    keep_freed_memory()
    spare_what_stays()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A file's name that is no text ends no command that has done its work.
        sys.stdout.reconfigure(errors="backslashreplace")
    if (gone := _folder_gone()) is not None:
        show_error(gone)
        sys.exit(1)
    try:
        build()()
    except KeyboardInterrupt:  # while commands are still imported: one that runs says so itself
        sys.exit(128 + signal.SIGINT)
    except OSError as error:
        if error.errno not in NOWHERE_TO_WRITE or error.filename is not None:
            raise
        show_error(
            UnbindError(f"standard output cannot be written ({error.strerror}); send it elsewhere, or make room")
        )
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is still to be written as the process ends
        sys.exit(1)


def _folder_gone() -> UnbindError | None:
    """What to say where the working directory was removed: libraries end the process there, and blame a file of their own."""
    try:
        Path.cwd()
    except FileNotFoundError:
        return UnbindError("the working directory was removed; change into one that is there, and try again")
    return None


def build() -> typer.Typer:
    """The application with every command."""
    if not app.registered_commands:
        for group in GROUPS:
            import_module(f"server.cli.{group}").register(app)
    return app
