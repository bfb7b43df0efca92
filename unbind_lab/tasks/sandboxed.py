"""The child of the harness: runs one program that a model wrote, evaluates expressions in it, and says what they are.

Stands alone, as it is run by path in an interpreter without site packages. Reads JSON from stdin: ``program``, ``tests`` and
``memory`` in bytes; writes a JSON list of strings: ``=`` and the value's repr, or ``!`` and the name of the exception. What the
program may not do (write files, start processes, use the network, load C libraries) raises PermissionError in it.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import resource
import sys
from typing import Any

CPU_SECONDS = 2
LONGEST = 2000  # characters of a repr that are compared
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
BARRED = (  # audit events that begin so
    *("socket.", "subprocess.", "ctypes.", "shutil.", "ftplib.", "http.", "urllib.", "smtplib.", "webbrowser."),
    *("pty.", "resource.", "mmap.", "fcntl.", "signal.pthread_kill", "sys.setprofile", "sys.settrace"),
    *("os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.startfile", "os.kill", "os.putenv"),
    *("os.unsetenv", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.chmod", "os.chown", "os.link"),
    *("os.symlink", "os.truncate", "os.chdir", "os.chflags", "os.setxattr", "os.utime"),
)
WRITES = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC


def barred(event: str, given: tuple[Any, ...]) -> None:
    """An audit hook, which nothing can take away again."""
    if event == "open" and isinstance(given[2], int) and given[2] & WRITES:
        raise PermissionError("no file may be written")
    if event.startswith(BARRED):
        raise PermissionError(f"{event} is not allowed")


def main() -> None:
    """Limits first, then the program."""
    asked = json.load(sys.stdin)
    if sys.platform == "linux":
        ctypes.CDLL(None).unshare(CLONE_NEWUSER | CLONE_NEWNET)  # no network at all, where the kernel lets it be left
    for what, most in (
        (resource.RLIMIT_CPU, CPU_SECONDS),
        (resource.RLIMIT_AS, asked["memory"]),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 32),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))
    told = os.dup(1)
    sys.stdin, sys.stdout, sys.stderr = io.StringIO(), io.StringIO(), io.StringIO()
    names: dict[str, Any] = {"__name__": "program"}
    code = compile(asked["program"], "program", "exec", dont_inherit=True)
    sys.addaudithook(barred)
    exec(code, names)  # noqa: S102 - what all this is for
    found = []
    for test in asked["tests"]:
        try:
            found.append("=" + repr(eval(test, names))[:LONGEST])  # noqa: S307
        except Exception as error:  # noqa: BLE001 - what it raises is part of what it does
            found.append("!" + type(error).__name__)
    os.write(told, json.dumps(found).encode())
    os._exit(0)


if __name__ == "__main__":
    main()
