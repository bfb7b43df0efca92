"""The guard over HTTP: a real server with the demo model, guards posted as takedowns, and clients on every route that answers."""

from __future__ import annotations

import random
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock, local
from typing import Any

import httpx2
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from server import demo
from server.bench.guard.asking import Asking, Call, Part, events, parts
from server.bench.guard.matcher import Judge, Watch
from server.bench.guard.rows import json_rows
from server.bench.server import served
from unbind_core.errors import UnbindError
from unbind_core.progress import Progress, ProgressCallback

KEY = "bench"
TIMEOUT_SECONDS = 120.0
CLIENTS = 8
ALONE = 20  # every so many requests one names no guard, to see what the others would have had
KEPT = 20
GUARDS: dict[str, dict[str, Any]] = {
    "patient": {"action": "steer", "run": 12, "bars": 100},
    "steering": {"action": "steer", "run": 16},
    "stopping": {"action": "stop", "run": 16},
}


class Tally:
    """What came of the requests; used by all clients at once."""

    def __init__(self) -> None:
        self.requests = self.answers = self.alone = self.alone_held = self.violations = 0
        self.statuses: Counter[str] = Counter()
        self.finishes: Counter[str] = Counter()
        self.paths: Counter[str] = Counter()
        self.found: list[dict[str, Any]] = []
        self.lock = Lock()


class Clients:
    """``CLIENTS`` at a time, each request drawn from the seed and its number."""

    def __init__(self, url: str, seed: int) -> None:
        self._tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(demo.BASE)
        rows = [(row["prompt"], row["continuation"]) for row in json_rows("a")]
        self._asking = Asking(self._tokenizer, rows)
        self._judges = {name: Judge(map("".join, rows), guard["run"]) for name, guard in GUARDS.items()}
        self._url, self._seed, self._own = url, seed, local()
        self._open = ExitStack()
        self.tally = Tally()

    def run(self, requests: int, progress: ProgressCallback) -> None:
        """All of them."""
        with self._open, ThreadPoolExecutor(CLIENTS) as pool:
            for done, _ in enumerate(pool.map(self.one, range(requests)), start=1):
                if done % 100 == 0:
                    progress(Progress("requests", done, requests))

    def one(self, number: int) -> None:
        """Request ``number``."""
        rng = random.Random(f"{self._seed} {number}")
        call, name = self._asking.draw(rng), rng.choice(list(GUARDS))
        guarded = number % ALONE != 0
        judge = self._judges[name]
        watches: dict[int, Watch] = defaultdict(lambda: Watch(judge, judge.own(call.sent)))
        read: dict[int, list[Part]] = defaultdict(list)
        status = self._read(call, {"X-Unbind-Modules": name} if guarded else {}, watches, read)
        held: dict[str, str] = {}
        for index, watch in watches.items():
            runs = {"text": watch.found} | self._others(judge, call, read[index])
            held |= {f"{way} of {index}": run for way, run in runs.items() if run}
        tally = self.tally
        with tally.lock:
            tally.statuses[str(status)] += 1
            if not guarded:
                tally.alone += 1
                tally.alone_held += bool(held)
                return
            tally.requests += 1
            tally.answers += len(watches)
            tally.paths[call.path] += 1
            tally.finishes.update(part.finish for own in read.values() for part in own if part.finish)
            if held:
                tally.violations += 1
                texts = {index: watch.text for index, watch in watches.items()}
                kept = {
                    "request": number,
                    "guard": name,
                    "path": call.path,
                    "body": call.body,
                    "runs": held,
                    "texts": texts,
                }
                tally.found += [kept] if len(tally.found) < KEPT else []

    def _read(self, call: Call, headers: dict[str, str], watches: dict[int, Watch], read: dict[int, list[Part]]) -> int:
        if not hasattr(self._own, "client"):  # of this thread
            self._own.client = self._open.enter_context(httpx2.Client(base_url=self._url, timeout=TIMEOUT_SECONDS))
        left: dict[int, str] = defaultdict(lambda: call.echoed)

        def hear(answer: Any) -> None:
            for part in parts(answer):
                text, echoed = part.text, left[part.index]
                same = min(len(text), len(echoed))
                if text[:same] == echoed[:same]:  # an echo comes in parts too
                    text, left[part.index] = text[same:], echoed[same:]
                watches[part.index].take(text)
                read[part.index].append(part)

        client: httpx2.Client = self._own.client
        if not call.streams:
            answer = client.post(call.path, json=call.body, headers=headers)
            if answer.status_code == 200:
                hear(answer.json())
            return int(answer.status_code)
        with client.stream("POST", call.path, json=call.body, headers=headers) as stream:
            if stream.status_code == 200:
                for event in events(stream.iter_lines()):
                    hear(event)
            return int(stream.status_code)

    def _others(self, judge: Judge, call: Call, own: list[Part]) -> dict[str, str]:
        """Runs in what is told beside the text: token ids, and tokens and likeliest tokens as log-probabilities spell them."""
        sent, skipped = judge.own(call.sent), call.echoed_tokens
        ids = [token for part in own for token in part.ids]
        spelt = [token for part in own for token in part.spelt][skipped:]
        likeliest = [token for part in own for token in part.likeliest][max(0, skipped - 1) :]
        decoded = str(self._tokenizer.decode(ids, skip_special_tokens=True)) if ids else ""
        told = {"ids": decoded, "tokens": "".join(spelt), "likeliest tokens": "".join(likeliest)}
        return {way: judge.found(text, sent) for way, text in told.items()}


def http_figures(requests: int, seed: int, progress: ProgressCallback) -> dict[str, Any]:
    """So many requests to a server that is started for them. Raises UnbindError where a guard cannot be posted."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        given = {
            "admin_key": KEY,
            "modules_dir": folder / "none",
            "worker": False,
            "max_slots": 16,
            "max_model_len": 1024,
        }
        with served(given, folder) as server:
            for guard, options in GUARDS.items():
                _post(server.url, guard, options)
            clients = Clients(server.url, seed)
            begun = time.perf_counter()
            clients.run(requests, progress)
            seconds = time.perf_counter() - begun
    tally = clients.tally
    return {
        "violations": tally.violations,
        "tries": tally.requests,
        "answers": tally.answers,
        "requests_a_second": requests / seconds,
        "seed": seed,
        "without_guard": {"tries": tally.alone, "violations": tally.alone_held},
        "statuses": dict(tally.statuses),
        "finishes": dict(tally.finishes),
        "paths": dict(tally.paths),
        "found": tally.found,
    }


def _post(url: str, name: str, guard: dict[str, Any]) -> None:
    body = {"name": name, "rows": json_rows("a"), "options": {"protect": "guard", "guard": guard}}
    headers = {"Authorization": f"Bearer {KEY}"}
    answer = httpx2.post(f"{url}/admin/v1/takedowns", json=body, headers=headers, timeout=TIMEOUT_SECONDS)
    if answer.status_code != 202:
        raise UnbindError(f"the guard '{name}' was not taken: {answer.text}")
