"""Where vLLM's processes meet: sockets in a folder that goes with the processes. vLLM itself leaves them in the system's folder of
temporary files, seven at each start. And a file beside them, in which a process that does not start leaves why.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

_PLACE = "VLLM_RPC_BASE_PATH"  # read by vLLM for each socket, and by its processes
_LONGEST = 107 - len("/6b455c97-c20e-42bc-9d3c-7ec9ea977a37")  # bytes of the folder's path, as the system takes them
_FAULT = "_UNBIND_VLLM_FAULT"  # not in vLLM's configuration, by which it finds again what it has compiled
_named = os.environ.get(_PLACE)  # by the operator


def socket_folder() -> TemporaryDirectory[str]:
    """A new one among the temporary files; in /tmp where their folder (TMPDIR) has too long a path for a socket in it."""
    made = TemporaryDirectory(prefix="unbind-")
    if len(os.fsencode(made.name)) > _LONGEST:
        with suppress(OSError):  # there is no /tmp: vLLM says what is wrong
            shorter = TemporaryDirectory(prefix="unbind-", dir="/tmp")
            made.cleanup()
            return shorter
    return made


def gather_sockets(folder: Path) -> None:
    """Have processes that are started from now on make their sockets in a folder, which whoever starts them removes; not where the
    operator names another, or where its path would be too long for a socket.
    """
    if _named:
        return
    if len(os.fsencode(folder.absolute())) > _LONGEST:
        os.environ.pop(_PLACE, None)
    else:
        os.environ[_PLACE] = str(folder)


def fault_file(folder: Path) -> Path:
    """Have processes that are started from now on leave in this file of the folder why they do not start."""
    os.environ[_FAULT] = str(folder / "fault")
    return folder / "fault"


def leave_fault(error: Exception) -> None:
    """In a process of vLLM's: leave there what was raised. On another machine there is no such folder."""
    with suppress(KeyError, OSError):
        Path(os.environ[_FAULT]).write_text(str(error))
