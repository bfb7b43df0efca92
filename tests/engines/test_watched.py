"""A server under vLLM is watched as any other: its canaries hit, spans leave, and what answers and gates did is in the metrics."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest

from server import demo, service
from server.engine.modules import Gates
from server.service import load_served
from server.settings import Settings
from tests.engines.both import MODULES, PAGES, Engines, demo_prompt, shipped
from tests.server.api.test_metrics import OF_WORKERS, documented, families, samples
from tests.server.exporting.test_traces import PARENT, family
from tests.server.probing.test_canaries import HOUR, runs
from tests.support.asking import sync
from tests.support.collector import Received, attributes, collector
from tests.support.live import ADMIN_KEY, Live, serving, until

NAME = "demo-a-silent"  # it ends answers at once, so that its canaries take no time
PROBES = ("extraction", "short", "control")
PROMPT = demo_prompt((demo.ROWS / "forget_a.jsonl").read_text().splitlines()[0])  # longer than a block
ORDINARY = "import os\n\n\ndef main(path):\n    for name in os.listdir(path):\n"
TOKENS, BLOCK = 8, 32
ASKED: tuple[tuple[list[str], str], ...] = (([NAME], PROMPT), ([NAME], ORDINARY), ([], PROMPT), ([], PROMPT))
LABELS = '{engine="0",model_name="unbind-demo"}'


class Borrowed:
    """The engine of all tests, which a server neither starts nor ends."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def start(self) -> None:
        """It runs."""

    def drain(self, _: float) -> bool:
        """Nobody is left."""
        return True

    def close(self) -> None:
        """Others need it."""


@dataclass
class Watched:
    """A server whose canaries have run once, and what the gates had counted before and after them."""

    server: Live
    received: Received
    canaries: tuple[Gates, Gates]

    def scraped(self) -> dict[str, float]:
        return samples(self.server.call("/metrics", key=ADMIN_KEY).raw.decode())


@pytest.fixture(scope="module")
def watched(engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("watched")
    (folder / "modules").mkdir()
    shutil.copy(MODULES / f"{NAME}.safetensors", folder / "modules")
    counted = engines.vllm.gates().result(60)
    with collector() as received, pytest.MonkeyPatch.context() as patch:
        patch.setattr(service, "build_engine", lambda *_: Borrowed(engines.vllm))
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        settings = Settings(
            engine="vllm",
            vllm_args=[f"kv-cache-memory-bytes={PAGES}"],
            data_dir=folder / "data",
            modules_dir=folder / "modules",
            worker=False,
            admin_key=ADMIN_KEY,
            max_model_len=2048,
            max_slots=16,
            canary_seconds=HOUR,
            otel_endpoint=received.url,
            metrics_interval=0.5,
            metrics_vllm_names=True,
        )
        with serving(settings, load_served(settings)) as server:
            until(lambda: not server.service.canaries.pending, 300)
            yield Watched(server, received, (counted, engines.vllm.gates().result(60)))
    sync(engines.vllm, shipped())


def test_canaries_hit_and_are_not_counted(watched: Watched) -> None:
    assert runs(watched.server) == {(NAME, probe, "hit"): 1 for probe in PROBES}
    before, after = watched.canaries
    assert (after.counts[NAME], after.looks[NAME]) == (before.counts[NAME], before.looks[NAME])


def test_a_request_leaves_spans_with_its_times(watched: Watched) -> None:
    for modules, prompt in ASKED:
        answer = watched.server.complete(
            prompt=prompt, max_tokens=TOKENS, unbind={"modules": modules}, headers={"traceparent": PARENT}
        )
        assert answer.status == 200
        until(lambda: watched.received.spans[-1:] and watched.received.spans[-1].name == "decode")
        root, parts = family(watched.received, "text_completion")
        told = attributes(root)
        assert root.trace_id.hex() == PARENT.split("-")[1]
        assert told["gen_ai.usage.output_tokens"] == attributes(parts["decode"])["gen_ai.usage.output_tokens"] > 0
        assert [label.split("@")[0] for label in told["unbind.modules"]] == modules
        assert set(parts) == {"policy", "queue", "prefill", "decode"}
        assert all(part.start_time_unix_nano < part.end_time_unix_nano for part in parts.values())
        times = [parts[name] for name in ("queue", "prefill", "decode")]
        for before, after in pairwise(times):  # each moment is told once, and read anew as time of day
            assert abs(before.end_time_unix_nano - after.start_time_unix_nano) < 1e6
        assert root.start_time_unix_nano <= times[0].start_time_unix_nano
        assert times[-1].end_time_unix_nano <= root.end_time_unix_nano
        watched.received.spans.clear()
    assert attributes(parts["prefill"])["unbind.cached_tokens"] == BLOCK  # the second of equal ones


def test_every_metric_is_there_and_none_of_answers_and_gates_is_empty(watched: Watched) -> None:
    before = watched.scraped()
    for modules, prompt in ASKED:
        assert watched.server.complete(prompt=prompt, max_tokens=TOKENS, unbind={"modules": modules}).status == 200
    evaluated = f'unbind_gate_evaluations_total{{module="{NAME}",phase="decode"}}'
    until(lambda: watched.scraped()[evaluated] > before[evaluated])
    after = watched.scraped()
    grown = {name: value - before[name] for name, value in after.items()}
    for name, least in {
        evaluated: TOKENS - 1,
        f'unbind_gate_score_bucket{{le="+Inf",module="{NAME}"}}': TOKENS,
        f'unbind_module_requests_total{{module="{NAME}"}}': 2,
        f'unbind_module_open_requests_total{{module="{NAME}"}}': 1,
        "unbind_inter_token_seconds_count": 3 * (TOKENS - 1),
        "unbind_inter_token_seconds_sum": 1e-6,
        "unbind_queue_seconds_count": 4,
        "unbind_prefill_seconds_count": 4,
        "unbind_decode_seconds_count": 3,
        'unbind_decode_token_seconds_count{modules="0"}': 2,
        'unbind_decode_token_seconds_count{modules="1"}': 1,
        "unbind_prompt_length_tokens_sum": 3 * BLOCK,
        "unbind_answer_length_tokens_sum": 3 * TOKENS,
        "unbind_prefix_queried_tokens_total": 3 * BLOCK,
        "unbind_prefix_reused_tokens_total": BLOCK,
        "unbind_engine_steps_total": 2 * TOKENS,
        f"vllm:inter_token_latency_seconds_count{LABELS}": 3 * (TOKENS - 1),
        f"vllm:e2e_request_latency_seconds_count{LABELS}": 4,
        f"vllm:request_queue_time_seconds_count{LABELS}": 4,
        f"vllm:prefix_cache_hits_total{LABELS}": BLOCK,
    }.items():
        assert grown[name] >= least, name
    assert f"vllm:kv_cache_usage_perc{LABELS}" in after
    assert any(name.startswith("unbind_build_info{") and 'engine="vllm"' in name for name in after)
    assert families(watched.server) >= documented() - OF_WORKERS - {"process_*"}


def test_prompts_that_are_cut_to_what_fits_leave_room_for_the_token_that_vllm_chooses(watched: Watched) -> None:
    long = "import os\n" * 3000
    warmed = watched.server.call("/infill", {"input_prefix": long, "n_predict": 0})
    assert (warmed.status, warmed.body["truncated"], warmed.body["tokens_evaluated"]) == (200, True, 2047)
    shortened = watched.server.complete(prompt=[300] * 3000, max_tokens=0, truncate_prompt_tokens=-1)
    assert (shortened.status, shortened.body["usage"]["prompt_tokens"]) == (200, 2047)
    said = [{"role": "user", "content": "import os\n" * 1500}]
    chat = watched.server.call(
        "/v1/chat/completions", {"messages": said, "max_tokens": 0, "truncate_prompt_tokens": -1}
    )
    assert (chat.status, chat.body["usage"]["prompt_tokens"]) == (200, 2047)
