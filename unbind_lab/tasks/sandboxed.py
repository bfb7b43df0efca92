"""The child that runs one program that a model wrote, and says what it does. :mod:`unbind_lab.tasks.child` starts it.

Of the package it imports :mod:`values` alone, in an interpreter without site packages. It reads a JSON object from stdin:
``program``, ``memory`` in bytes, ``processor`` in seconds, and either ``tests``, expressions that are evaluated after the program,
or ``entry``, a function of it, that is called with each of ``inputs`` (values) in at most ``limits`` seconds. Of tests it writes a
list of texts: ``=`` and the value's repr, or ``!`` and the name of the exception. Of calls it writes a list of ``[seconds,
value]``, or, where ``sets`` is asked for, ``[seconds, value, set of it]``, up to the first that fails. Large values are digests but
for the inputs whose numbers ``whole`` has.

What is defended: the program learns no right answer, as values are compared by who started the child, so nothing that it overrides
makes it right. What it may not do raises PermissionError in it: write files, read any but the library's, start processes, use the
network, load C libraries. Memory and processor time are limited by the kernel, time by the clock and the length of what is said by
who started it. What is not: the limit of a call is kept by a signal, which the program can take away, and the rest by an audit
hook, which a program that is made to break the interpreter itself can get around. It is a guard for what models write, not for
attackers.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from unbind_lab.tasks.values import decode, told

LONGEST = 2000  # characters of a repr that are compared
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
BARRED = (  # audit events that begin so
    *("socket.", "subprocess.", "ctypes.", "shutil.", "ftplib.", "http.", "urllib.", "smtplib.", "webbrowser."),
    *("pty.", "resource.", "mmap.", "fcntl.", "signal.pthread_kill", "sys.setprofile", "sys.settrace", "gc."),
    *("os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.startfile", "os.kill", "os.putenv"),
    *("os.unsetenv", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.chmod", "os.chown", "os.link"),
    *("os.symlink", "os.truncate", "os.chdir", "os.chflags", "os.setxattr", "os.utime"),
)
WRITES = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC


class TimeIsUp(Exception):
    """A call takes longer than it may. A program may catch it, as it may in EvalPlus."""


class Unreadable(io.StringIO):
    """Standard input that is not there."""

    def read(self, *_: Any) -> str:
        """Raises OSError."""
        raise OSError("nothing can be read")

    readline = readlines = read  # type: ignore[assignment]


def hook(readable: tuple[str, ...]) -> Callable[[str, tuple[Any, ...]], None]:
    """An audit hook, which nothing can take away again. It looks up nothing that a program can replace."""
    barred, writes, text, refused = BARRED, WRITES, str, PermissionError

    def heard(event: str, given: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = given
            if flags and flags & writes:
                raise refused("no file may be written")
            if path.__class__ is not text or not path.startswith(readable):
                raise refused("no file but the library's may be read")
        if event.startswith(barred):
            raise refused(f"{event} is not allowed")

    return heard


def main() -> None:
    """Limits first, then the program."""
    asked = json.load(sys.stdin)
    readable = [os.path.dirname(os.__file__)]  # noqa: PTH120 - pathlib takes long to import
    if packages := asked.get("packages"):
        sys.path.append(packages)
        import numpy as np  # what it loads may not be loaded later

        sys.path.pop()
        readable.append(os.path.dirname(np.__file__))  # noqa: PTH120
    if sys.platform == "linux":
        ctypes.CDLL(None).unshare(CLONE_NEWUSER | CLONE_NEWNET)  # no network at all, where the kernel lets it be left
    for what, most in (
        (resource.RLIMIT_CPU, asked["processor"]),
        (resource.RLIMIT_AS, asked["memory"]),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 32),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))
    out, write, leave, form = os.dup(1), os.write, os._exit, json.dumps
    sys.stdin, sys.stdout, sys.stderr = Unreadable(), io.StringIO(), io.StringIO()
    code = compile(asked["program"], "program", "exec", dont_inherit=True)
    answers = _called if "entry" in asked else _evaluated
    sys.addaudithook(hook(tuple(readable)))
    said = memoryview(form(answers(code, asked)).encode())
    while said:
        said = said[write(out, said) :]
    leave(0)


def _evaluated(code: Any, asked: Mapping[str, Any]) -> list[str]:
    names: dict[str, Any] = {"__name__": "program"}
    exec(code, names)  # noqa: S102 - what all this is for
    found = []
    for test in asked["tests"]:
        try:
            found.append("=" + repr(eval(test, names))[:LONGEST])  # noqa: S307
        except Exception as error:  # noqa: BLE001 - what it raises is part of what it does
            found.append("!" + type(error).__name__)
    return found


def _called(code: Any, asked: Mapping[str, Any]) -> list[list[Any]]:
    names: dict[str, Any] = {}
    clock, found, inputs = time.perf_counter, [], [decode(given) for given in asked["inputs"]]
    signal.signal(signal.SIGALRM, _stopped)
    try:
        exec(code, names)  # noqa: S102
        entry = names[asked["entry"]]
        for number, (given, limit) in enumerate(zip(inputs, asked["limits"], strict=True)):
            begun = clock()
            signal.setitimer(signal.ITIMER_REAL, limit)
            try:
                value = entry(*given)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            taken = clock() - begun
            values = (value, set(value)) if asked["sets"] else (value,)
            found.append([taken, *(told(one, whole=number in asked["whole"]) for one in values)])
    except BaseException:  # noqa: BLE001, S110 - what stands behind the first failure is not looked at
        pass
    return found


def _stopped(_number: int, _frame: Any) -> None:
    raise TimeIsUp
