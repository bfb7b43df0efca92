"""Install what the locks say into the Python that runs this; ``--no-dev`` leaves out the tools of development, ``--vllm`` takes
the lock of the environment with vLLM.

Every file is checked against the hashes of the locks. torch comes first and by itself: pip's configuration chooses its build (a
folder or an index with CPU builds, where one is configured), which pip's hash mode would pass over for the plain index's own.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

ROOT = Path(__file__).parent.parent
LOCK, VLLM = ROOT / "requirements.lock", ROOT / "requirements-vllm.lock"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


def pip(*arguments: str | Path) -> None:
    """Run pip; what it says about a failure is on the screen by then."""
    if code := subprocess.run([*PIP, *map(str, arguments)], check=False).returncode:
        sys.exit(code)


def installed_torch() -> str:
    """The version that is there, without its local label."""
    try:
        return distribution("torch").version.split("+")[0]
    except PackageNotFoundError:
        return ""


def torch_entry(lock: str) -> tuple[str, str]:
    """torch's lines of a lock with all their hashes, and its version."""
    entry = re.search(r"^torch==(\S+)( \\\n +--hash=\S+)+$", lock, re.MULTILINE)
    if entry is None:
        sys.exit("requirements.lock names no torch: run `make lock`")
    return entry[0], entry[1]


def install_torch(lock: Path) -> None:
    """Take the build that pip prefers here, and install it if the lock has its hash."""
    entry, version = torch_entry(lock.read_text(encoding="utf-8"))
    if installed_torch() == version:
        return
    with tempfile.TemporaryDirectory() as folder:
        pip("download", "--no-deps", "--dest", folder, f"torch=={version}")
        pinned = Path(folder, "torch.lock")
        pinned.write_text(entry + "\n", encoding="utf-8")
        pip("install", "--no-deps", "--no-index", "--find-links", folder, "--require-hashes", "-r", pinned)


def main() -> None:
    """Install torch, then the rest; what CUDA builds need only where torch is one."""
    if sys.argv[1:] == ["--vllm"]:
        install_torch(VLLM)
        pip("install", "--no-deps", "--require-hashes", "-r", VLLM)  # the lock is whole but for what vLLM does without
        return
    install_torch(LOCK)
    locks = [LOCK]
    if sys.argv[1:] != ["--no-dev"]:
        locks.append(ROOT / "requirements-dev.lock")
    if sys.platform == "linux" and any(text.startswith("nvidia-") for text in distribution("torch").requires or ()):
        locks.append(ROOT / "requirements-cuda.lock")
    pip("install", "--require-hashes", *(part for lock in locks for part in ("-r", lock)))


if __name__ == "__main__":
    main()
