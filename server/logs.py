"""How log lines look: one line for people, or one JSON object for machines, on standard error."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Collection
from datetime import UTC, datetime

from unbind_core.errors import UnbindError

MOST_NAMED = 20
FIELDS = ("request_id", "method", "route", "status", "seconds", "key_id", "profile")


class JsonFormatter(logging.Formatter):
    """Time, level, logger and message, and what a line says in fields of its own."""

    def format(self, record: logging.LogRecord) -> str:
        """One JSON object without line ends."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: getattr(record, name) for name in FIELDS if getattr(record, name, None) is not None}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class OwnWords(logging.Filter):
    """Where the application does not start for a reason that is worded for people, uvicorn's traceback is that reason."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Every line is kept."""
        if record.name == "uvicorn.error" and (told := record.getMessage().strip()).startswith("Traceback"):
            _, *after = re.split(f"\n(?:{'|'.join(map(re.escape, _worded(UnbindError)))}): ", told)
            if after and "\nTraceback (" not in after[-1]:
                record.msg, record.args = after[-1], ()
        return True


def _worded(kind: type[UnbindError]) -> list[str]:
    """The error and all that are made of it, wherever they are declared, as a traceback names them."""
    return [f"{kind.__module__}.{kind.__qualname__}", *(name for one in kind.__subclasses__() for name in _worded(one))]


def set_up_logging(level: str, form: str = "text") -> None:
    """Log to standard error from ``level`` on, where nothing else is written then: of what loads a model no bars of progress."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed: the next file opened would get its number, and what is written to it
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "r" if name == "stdin" else "w"))
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # read once, as transformers is imported
    if (loader := sys.modules.get("transformers.utils.logging")) is not None:
        loader.disable_progress_bar()
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)-7s %(name)s %(message)s")
    handler.setFormatter(JsonFormatter() if form == "json" else text)
    logging.basicConfig(level=level.upper(), handlers=[handler])
    if level != "debug":
        handler.addFilter(OwnWords())
        for chatty in ("uvicorn.error", "httpx2", "httpx", "asyncio", "alembic.runtime.plugins"):
            logging.getLogger(chatty).setLevel(logging.WARNING)


def change(before: Collection[str], after: Collection[str]) -> str:
    """How many of a kind are in use now, what came and what went: a line that stays short where there are thousands."""
    came, went = sorted({*after} - {*before}), sorted({*before} - {*after})
    parts = (f"{word}: {_named(names)}" for word, names in (("new", came), ("gone", went)) if names)
    return "; ".join([f"{len(after)} in use", *parts])


def _named(names: list[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
