"""The process that runs a job's stages: one child a job, which the worker may kill at any instant.

It is started ahead, so that its imports are over when a job comes. It reads one task from standard input, leaves a checkpoint
after each stage, and tells of progress by lines of JSON on the pipe that was its standard output; empty lines in between say
that it lives. It never touches the database.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from server.collector import spare_what_stays
from server.registry.files import private, save_json
from server.registry.tables import JobKind
from server.worker.plan import Task, ends
from unbind_core.errors import UnbindError
from unbind_core.progress import Progress

SAY_SECONDS = 0.25
BEAT_SECONDS = 0.5
STEPS = 4  # after so many steps a stage counts as half done
ALIVE = "\n"
_PR_SET_PDEATHSIG = 1
# What these say of themselves is about machines and files; other errors might quote a row, and are named by place alone.
_SPEAKING = (UnbindError, OSError, MemoryError, RuntimeError)

Stage = Callable[[Task, Callable[[Progress], None]], dict[str, Any]]


def die_with_parent(number: int, parent: int) -> None:
    """Have the kernel send signal ``number`` here when the parent process ends; end now if it has ended already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def first_to_end() -> None:
    """Have the kernel end this process before any other where memory runs out: a job goes on after its last finished stage, the
    answers of a server that is larger and ended in its place do not.
    """
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


@dataclass
class Voice:
    """Lines of JSON to the worker; progress at most every ``pause`` seconds, whatever the hot loop calls."""

    out: IO[str]
    pause: float = SAY_SECONDS
    said: float = field(default=0.0)
    part: float = 0.0
    steps: int = 0
    latest: Progress | None = None
    turn: threading.Lock = field(default_factory=threading.Lock)

    def say(self, **message: Any) -> None:
        """One line."""
        self._write(json.dumps(message) + "\n")

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Say all the time that this process lives: a stage may compute for long without a word."""
        over = threading.Event()

        def run() -> None:
            with suppress(OSError):  # nobody listens any more
                while not over.is_set():
                    self._write(ALIVE)
                    over.wait(BEAT_SECONDS)

        thread = threading.Thread(target=run, name="unbind-beat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _write(self, line: str) -> None:
        with self.turn:
            self.out.write(line)
            self.out.flush()

    def begin(self, stage: str) -> None:
        """A stage starts."""
        self.part, self.steps, self.latest, self.said = 0.0, 0, None, 0.0
        self.say(stage=stage)

    def progress(self, progress: Progress) -> None:
        """The callback for the method."""
        latest, self.latest = self.latest, progress
        if latest is not None and (progress.stage != latest.stage or progress.done < latest.done):
            self.steps += 1
        # How many steps a stage has is not known beforehand, and a search has many: n of them are n / (n + 4) of it. So each
        # takes it further, however many there were.
        before, after = (steps / (steps + STEPS) for steps in (self.steps, self.steps + 1))
        self.part = max(self.part, before + (after - before) * progress.done / max(progress.total, 1))
        now = time.monotonic()
        if now - self.said >= self.pause:
            self.said = now
            text = f"{progress.stage} {progress.done}/{progress.total} {progress.message}".strip()
            self.say(progress=self.part, message=text)


def main(load_stages: Callable[[], Mapping[str, Stage]]) -> None:
    """Wait for a task on standard input and run its stages. ``sys.argv[1]`` is the worker's process id."""
    die_with_parent(signal.SIGKILL, int(sys.argv[1]))
    first_to_end()
    for number in (signal.SIGINT, signal.SIGHUP):  # the worker decides what Ctrl-C means, and a terminal that closes
        signal.signal(number, signal.SIG_IGN)
    spare_what_stays()
    # Libraries print what they like: standard output goes where the log goes, and the pipe stays ours.
    voice = Voice(os.fdopen(os.dup(1), "w", encoding="utf-8"))
    os.dup2(2, 1)
    with voice.beating():
        stages = load_stages()
        line = sys.stdin.readline()
        if line:
            given = json.loads(line)
            run(Task(**{**given, "kind": JobKind(given["kind"])}), stages, voice)


def run(task: Task, stages: Mapping[str, Stage], voice: Voice) -> None:
    """Run the stages that are left, each ended by a checkpoint; says "failed" with the reason, or "finished"."""
    done = dict(task.done)
    try:
        private(Path(task.folder))
        for stage in task.todo:
            voice.begin(stage)
            started = time.monotonic()
            result = stages[stage](Task(**{**vars(task), "done": done}), voice.progress)
            done[stage] = {
                "seconds": round(time.monotonic() - started, 3),
                "folder": Path(task.folder).name,
                "files": sorted(path.name for path in Path(task.folder).iterdir() if path.is_file()),
                "result": result,
            }
            save_json(Path(task.folder) / f"{stage}.json", done[stage])
            voice.say(done=stage)
            if ends(stage, result):
                break
    except _SPEAKING as error:
        foreseen = isinstance(error, (UnbindError, OSError))
        voice.say(failed=str(error) if foreseen else f"{type(error).__name__}: {error}"[:2000])
        if not foreseen:
            traceback.print_exc()
    except Exception as error:  # noqa: BLE001 - whatever happens, the worker is told
        place = traceback.extract_tb(error.__traceback__)[-1]
        voice.say(failed=f"{type(error).__name__} in {Path(place.filename).name}, line {place.lineno}")
    else:
        voice.say(finished=True)


def _load() -> Mapping[str, Stage]:
    from server.worker.stages import STAGES

    return STAGES


if __name__ == "__main__":
    main(_load)
