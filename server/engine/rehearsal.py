"""Whether a form compiles within its seconds, found out in a process that can be ended: a thread cannot be, and under the library's
own limits forms of some hundred characters take hours and all memory.

Run as a program it is that process. It needs the tokenizer's JSON alone, so that it is there in half a second and small.
"""

from __future__ import annotations

import json
import math
import resource
import signal
import subprocess
import sys
import threading
import time
from copy import copy
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer


def over(seconds: float) -> str:
    """What is said of a form that takes longer."""
    return f"takes over {seconds:g} s to compile; send a simpler one"


def limits(size: int) -> LLParserLimits:
    """What the library may use for a form of at most ``size`` symbols.

    Of the forms that compile in time the costliest found take 0.1 s at a step, which is the thread's that runs the model.
    """
    return LLParserLimits(
        max_grammar_size=size,
        max_lexer_states=50_000,
        initial_lexer_fuel=300_000,
        step_lexer_fuel=200_000,
        verbose_errors=False,
    )


class Rehearsal:
    """The process, started at the first form and again where one has ended it."""

    def __init__(self, tokenizer: Any, width: int, ends: list[int]) -> None:
        """See ``Grammars``."""
        self._tokenizer, self._width, self._ends = tokenizer, width, ends
        self._process: subprocess.Popen[str] | None = None
        self._changing = threading.Lock()  # which process it is
        self._closed = False

    def refused(self, source: str, size: int, seconds: float) -> str:
        """Why a form is not to be compiled here; empty where it may. One call at a time."""
        process = self._started()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps({"source": source, "size": size, "seconds": seconds}) + "\n")
            process.stdin.flush()
            taken = process.stdout.readline()
        except OSError:  # it has ended meanwhile
            taken = ""
        if not taken:
            with self._changing:
                self._end(process)  # its pipe may be closed for a moment before it counts as ended
            return over(seconds)
        return over(seconds) if float(taken) > seconds else ""

    def close(self) -> None:
        """End the process, whatever it does."""
        with self._changing:
            self._closed = True
            if self._process is not None:
                self._end(self._process)

    def _started(self) -> subprocess.Popen[str]:
        with self._changing:
            if self._process is not None and self._process.poll() is None:
                return self._process
            if self._closed:
                raise RuntimeError("the engine is closed")
            self._process = process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__],  # not what is called so in the working directory
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                start_new_session=True,  # an interrupt at the terminal is the server's
            )
        assert process.stdin is not None and process.stdout is not None
        backend = copy(self._tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        told = {"tokenizer": backend.to_str(), "width": self._width, "ends": self._ends}
        process.stdin.write(json.dumps(told) + "\n")
        process.stdin.flush()
        if not process.stdout.readline():
            raise RuntimeError(f"the process that tries forms did not start: it ended with {process.wait()}")
        return process

    @staticmethod
    def _end(process: subprocess.Popen[str]) -> None:
        process.kill()
        with process:  # closes its pipes and waits
            pass


def _bound(seconds: float) -> None:
    """Have the system end this process after so many more seconds of a processor, a second more at most."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time() + seconds), hard))


def _try(tokens: LLTokenizer, asked: dict[str, Any]) -> float:
    """Compile a form and make its first step; the seconds of a processor that it took."""
    begun = time.process_time()
    _bound(asked["seconds"])
    matcher = LLMatcher(tokens, asked["source"], log_level=0, limits=limits(asked["size"]))
    if not matcher.is_error():
        allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        if not matcher.is_error() and allowed.any():
            matcher.consume_token(int(allowed.argmax()))
    return time.process_time() - begun


def main() -> None:
    """The process: a line for the tokenizer, then one for each form, until its server ends."""
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    told = json.loads(sys.stdin.readline())
    tokens = LLTokenizer(told["tokenizer"], n_vocab=told["width"], eos_token=told["ends"])
    _say("ready")
    for line in sys.stdin:
        _say(str(_try(tokens, json.loads(line))))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
