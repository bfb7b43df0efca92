#!/usr/bin/env python3
"""Run the commands of the Dockerfile's stages in fresh roots, and its service in the last, where there is no container engine.

    debootstrap --variant=minbase --include=python3-venv,ca-certificates bookworm BASE
    ln -s python3 BASE/usr/bin/python
    .ci/image.py BASE FOLDER --target cpu --mount WHEELS --env PIP_FIND_LINKS=WHEELS

BASE stands in for python:3.11-slim. Needs root, for chroot and mounts. A stage is a folder in FOLDER; the service runs as the
image's user with a read-only root, no capabilities and no way to new ones, as docker-compose.yml has it, until its health check
is content and its model is loaded, and then gets SIGTERM.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS, STOP_SECONDS = 300, 60


@dataclass
class Stage:
    """What a stage leaves behind."""

    root: Path
    environment: dict[str, str]
    workdir: str = "/"
    user: str = "0:0"
    words: dict[str, str] = field(default_factory=dict)


def say(line: str) -> None:
    """Tell what is done."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def do(program: str, *arguments: str | Path) -> None:
    """Run a program of this machine. Raises CalledProcessError."""
    subprocess.run([program, *arguments], check=True)


@contextmanager
def mounted(*command: str | Path) -> Iterator[None]:
    """``mount ...``, until leaving; the last word is where."""
    do("mount", *command)
    try:
        yield
    finally:
        do("umount", command[-1])


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Each instruction and what stands behind it, lines joined."""
    text = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
    for line in filter(None, text.splitlines()):
        word, _, rest = line.partition(" ")
        yield word, rest.strip()


def variables(text: str, known: dict[str, str]) -> dict[str, str]:
    """NAME=VALUE pairs, with $NAME in values replaced."""
    return {
        name: re.sub(r"\$(\w+)", lambda found: known.get(found[1], ""), value)
        for name, _, value in (pair.partition("=") for pair in shlex.split(text))
    }


def run(stage: Stage, command: list[str], mounts: list[str]) -> None:
    """A command of a stage in its root, with /proc and the folders of packages."""
    with ExitStack() as stack:
        stack.enter_context(mounted("-t", "proc", "proc", stage.root / "proc"))
        stack.enter_context(mounted("--bind", "/dev", stage.root / "dev"))
        for path in mounts:
            inside = stage.root / path.lstrip("/")
            inside.mkdir(parents=True, exist_ok=True)
            stack.enter_context(mounted("--bind", path, inside))
        subprocess.run(inside_root(stage, command), env=stage.environment, check=True)


def inside_root(stage: Stage, command: list[str]) -> list[str]:
    """The command as the stage's user in its folder."""
    change = 'cd "$0" && exec "$@"'
    return ["chroot", f"--userspec={stage.user}", str(stage.root), "sh", "-c", change, stage.workdir, *command]


def copy(stage: Stage, stages: dict[str, Stage], rest: str) -> None:
    """COPY, from the repository or another stage."""
    *sources, target = rest.split()
    other = ROOT
    if sources[0].startswith("--from="):
        other = stages[sources.pop(0).removeprefix("--from=")].root
    into = stage.root / str(Path(stage.workdir, target)).lstrip("/")
    for source in sources:
        found = other / source.lstrip("/")
        to = into / found.name if target.endswith("/") else into
        to.parent.mkdir(parents=True, exist_ok=True)
        do("cp", "-a", "-T", found, to)


def needed(target: str, lines: list[tuple[str, str]]) -> set[str]:
    """The target and all stages that it rests on."""
    parents: dict[str, set[str]] = {}
    for word, rest in lines:
        if word == "FROM":
            parent, _, name = rest.split()
            parents[name] = {parent}
        elif found := re.match(r"--from=(\S+)", rest):
            parents[name].add(found[1])
    wanted, found_now = set[str](), {target}
    while found_now:
        wanted |= found_now
        found_now = set[str]().union(*(parents[one] for one in found_now)) & parents.keys()
    return wanted


def build(target: str, base: Path, folder: Path, mounts: list[str], given: dict[str, str]) -> Stage:
    """The stages that the target needs. The environment ``given`` is for RUN alone."""
    lines = list(instructions((ROOT / "Dockerfile").read_text(encoding="utf-8")))
    wanted, skipped = needed(target, lines), False
    stages: dict[str, Stage] = {}
    stage = Stage(base, {})
    for word, rest in lines:
        if word == "FROM":
            parent, _, name = rest.split()
            skipped = name not in wanted
        if skipped:
            continue
        say(f"{word} {rest[:110]}")
        if word == "FROM":
            before = stages.get(parent) or Stage(base, {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin"})
            stage = Stage(folder / name, dict(before.environment), before.workdir, before.user, dict(before.words))
            do("cp", "-a", "--reflink=auto", before.root, stage.root)
            stages[name] = stage
        elif word in ("ENV", "ARG"):
            stage.environment |= variables(rest, stage.environment)
        elif word == "WORKDIR":
            stage.workdir = rest
            (stage.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif word == "USER":
            stage.user = rest
        elif word == "COPY":
            copy(stage, stages, rest)
        elif word == "RUN":
            plain = dict(stage.environment)
            stage.environment |= given
            run(stage, ["sh", "-c", rest], mounts)
            stage.environment = plain
        else:
            stage.words[word] = rest
    return stages[target]


def serve(stage: Stage) -> None:
    """Run what the image runs until its health check is content; then end it."""
    command = [*json.loads(stage.words["ENTRYPOINT"]), *json.loads(stage.words["CMD"])]
    health = json.loads(stage.words["HEALTHCHECK"].partition("CMD")[2])
    bare = ["setpriv", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
    key = stage.root / "run/admin_key"
    key.write_text(secrets.token_hex(32))
    key.chmod(0o444)
    environment = stage.environment | {"UNBIND_ADMIN_KEY_FILE": "/run/admin_key"}
    with ExitStack() as stack:
        data = stage.root / stage.workdir.lstrip("/")
        for mount in (
            ("--bind", stage.root, stage.root),
            ("-o", "remount,bind,ro", stage.root),
            ("-t", "tmpfs", "tmpfs", stage.root / "tmp"),
            ("-t", "tmpfs", "-o", f"uid={stage.user.split(':')[0]},mode=700", "tmpfs", data),
            ("-t", "proc", "proc", stage.root / "proc"),
            ("--bind", "/dev", stage.root / "dev"),
        ):
            if "remount,bind,ro" in mount:
                do("mount", *mount)
            else:
                stack.enter_context(mounted(*mount))
        started = time.monotonic()
        server = subprocess.Popen(inside_root(stage, [*bare, *command]), env=environment)
        try:
            # Healthy is what the image asks for; ready is a model that is loaded.
            for asked in (health, [word.replace("/health", "/ready") for word in health]):
                while subprocess.call(inside_root(stage, asked), env=environment, stderr=subprocess.DEVNULL):
                    if server.poll() is not None or time.monotonic() - started > START_SECONDS:
                        raise SystemExit(f"no answer after {time.monotonic() - started:.0f} s: {server.poll()}")
                    time.sleep(1)
                say(f"{asked[-1].rpartition('/')[2].split(chr(39))[0]} after {time.monotonic() - started:.1f} s")
        finally:
            server.send_signal(signal.SIGTERM)
            say(f"ended with {server.wait(STOP_SECONDS)}")


def main() -> None:
    """Build the target, and run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--mount", action="append", default=[], help="folder that pip needs, at the same place inside")
    parser.add_argument("--env", action="append", default=[], help="NAME=VALUE for RUN")
    parser.add_argument("--serve", action=argparse.BooleanOptionalAction, default=True)
    asked = parser.parse_args()
    if os.getuid():
        raise SystemExit("chroot and mounts need root")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that mounts end with it
    asked.folder.mkdir(parents=True)
    given = dict(pair.split("=", 1) for pair in asked.env)
    stage = build(asked.target, asked.base, asked.folder, asked.mount, given)
    if asked.serve:
        serve(stage)


if __name__ == "__main__":
    main()
