"""Where vLLM's processes meet: sockets in a folder that goes with this process. vLLM itself leaves them in the system's folder of
temporary files, seven at each start.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

_PLACE = "VLLM_RPC_BASE_PATH"  # read by vLLM for each socket, and by its processes
_LONGEST = 107 - len("/6b455c97-c20e-42bc-9d3c-7ec9ea977a37")  # bytes of the folder's path, as the system takes them


@cache
def gather_sockets() -> TemporaryDirectory[str] | None:
    """Have vLLM make its sockets in a folder of their own, which is removed when this process ends; None where the operator names
    another, or its path would be too long for a socket.
    """
    if os.environ.get(_PLACE):
        return None
    folder = TemporaryDirectory(prefix="unbind-")
    if len(os.fsencode(Path(folder.name).absolute())) > _LONGEST:
        folder.cleanup()
        return None
    os.environ[_PLACE] = folder.name
    return folder
