"""Canaries on a running server: what good modules, modules that do nothing and modules without rows show, and who hears of it."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from server import demo
from server.engine.embedded.scheduler import Plan
from server.probing.asking import Answer
from server.probing.results import Canaries, Outcome
from server.probing.rounds import Held, Judge, left_alone
from server.probing.texts import Row, Texts
from server.registry.files import forget_file, save_forget
from server.service import load_served
from server.settings import Settings
from server.sources import SettingsError, load_settings
from tests.support.live import ADMIN_KEY, Live, live, serving, until
from tests.support.modules import build_module
from unbind_core.architecture import load_model
from unbind_core.module import UnbindModule
from unbind_core.rows import ForgetRow, forget_digest, parse_forget

MODULES = Path(__file__).parents[3] / "modules"
HOUR = 3600.0


def runs(server: Live) -> dict[tuple[str, str, str], float]:
    """(module, probe, result) -> how often, as the metrics have it."""
    found = {}
    for line in server.call("/metrics", key=ADMIN_KEY).raw.decode().splitlines():
        if line.startswith("unbind_canary_runs_total{"):
            labels = dict(part.split("=") for part in line[line.index("{") + 1 : line.index("}")].split(","))
            values = {name: value.strip('"') for name, value in labels.items()}
            found[values["module"], values["probe"], values["result"]] = float(line.split()[-1])
    return found


def told(server: Live, module: str) -> str:
    return str(server.admin(f"/modules/{module}").body["canary"]["told"])


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Live, list[str]]]:
    """The demo model with a shipped module and one that does nothing, each tried once; and all that was logged."""
    folder = tmp_path_factory.mktemp("canaries")
    (folder / "modules").mkdir()
    shutil.copy(MODULES / "demo-a-silent.safetensors", folder / "modules")
    good = UnbindModule.load(MODULES / "demo-a-silent.safetensors")
    replace(good, name="feeble", kappa=1e-9).save(folder / "modules" / "feeble.safetensors")
    settings = Settings(
        data_dir=folder / "data",
        modules_dir=folder / "modules",
        worker=False,
        admin_key=ADMIN_KEY,
        max_model_len=512,
        max_slots=2,
        canary_seconds=HOUR,
        ready_needs_canary=True,
    )
    lines: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    kept = Kept()
    logging.getLogger("unbind").addHandler(kept)
    try:
        with serving(settings, load_served(settings)) as server:
            assert server.call("/ready").status == 503 and "not run yet" in server.call("/ready").error["message"]
            until(lambda: not server.service.canaries.pending)
            yield server, lines
    finally:
        logging.getLogger("unbind").removeHandler(kept)


def test_a_good_module_hits_with_every_probe(tried: tuple[Live, list[str]]) -> None:
    server, _ = tried
    mine = {key[1:]: value for key, value in runs(server).items() if key[0] == "demo-a-silent"}
    assert mine == {("extraction", "hit"): 1, ("control", "hit"): 1, ("short", "hit"): 1}
    text = server.call("/metrics", key=ADMIN_KEY).raw.decode()
    stamps = [line for line in text.splitlines() if line.startswith("unbind_canary_last_hit_timestamp_seconds{")]
    assert sum('module="demo-a-silent"' in line and float(line.split()[-1]) > 1e9 for line in stamps) == 3
    assert 'unbind_canary_seconds_count{probe="extraction"}' in text
    assert told(server, "demo-a-silent").startswith("extraction: hit at ")


def test_a_module_that_does_nothing_misses(tried: tuple[Live, list[str]]) -> None:
    server, lines = tried
    assert runs(server)["feeble", "extraction", "miss"] == 1 and ("feeble", "extraction", "hit") not in runs(server)
    assert "(an answer recites a row)" in told(server, "feeble")
    assert "module 'feeble': its canary misses (extraction: an answer recites a row)" in lines


def test_nothing_of_the_rows_is_told_and_no_client_is_counted(tried: tuple[Live, list[str]]) -> None:
    server, lines = tried
    shown = server.call("/metrics", key=ADMIN_KEY).raw.decode()
    texts = [server.admin(f"/modules/{name}").raw.decode() for name in ("demo-a-silent", "feeble")]
    rows = parse_forget((demo.ROWS / "forget_a.jsonl").read_text().splitlines())
    pieces = [
        piece for row in rows for piece in (row.prompt + row.continuation).splitlines() if len(piece.strip()) > 12
    ]
    for text in (shown, *texts, *lines):
        assert not any(piece.strip() in text for piece in pieces)
    counted = {line.split("{")[0].split()[0]: float(line.split()[-1]) for line in shown.splitlines() if line[:1] != "#"}
    assert counted["unbind_prompt_tokens_total"] == counted["unbind_generated_tokens_total"] == 0
    assert counted["unbind_first_token_seconds_count"] == 0 and "unbind_module_requests_total" not in counted
    assert 'route="/v1/completions"' not in shown
    evaluated = [line for line in shown.splitlines() if line.startswith("unbind_gate_evaluations_total")]
    assert all(line.endswith(" 0.0") for line in evaluated)


def test_a_server_is_ready_unless_the_canary_of_an_enforced_module_misses(tried: tuple[Live, list[str]]) -> None:
    server, _ = tried
    assert server.call("/ready").status == 200  # nothing enforces those that miss
    server.admin("/policies/global", {"enforced": ["demo-a-silent"]}, "PUT")
    assert server.call("/ready").status == 200
    server.admin("/policies/global", {"enforced": ["demo-a-silent", "feeble"]}, "PUT")
    refused = server.call("/ready")
    assert (refused.status, refused.error["code"]) == (503, "canary_missed")
    assert refused.error["message"] == "the canary of module 'feeble' misses (extraction: an answer recites a row)"
    server.admin("/policies/global", {}, "PUT")
    assert server.call("/ready").status == 200


def test_without_rows_it_says_so_and_with_them_it_asks(checkpoint: Path, tmp_path: Path) -> None:
    rows = [
        ForgetRow(f"def total_{n}(a, b):\n    # adds\n", f"    return total(a, b, {n}) + total(b, a, {n})\n")
        for n in range(3)
    ]
    digest = save_forget(tmp_path / "data", rows)
    made = replace(build_module(load_model(checkpoint).identity, "kept"), forget_digest=digest)
    (tmp_path / "modules").mkdir()
    made.save(tmp_path / "modules" / "kept.safetensors")
    with live(checkpoint, tmp_path, ("one",), canary_seconds=0.2, enforced={"kept": 1.0}) as server:
        until(lambda: runs(server).get(("kept", "extraction", "hit"), 0) > 0)
        assert not any(module == "one" and probe != "control" for module, probe, _ in runs(server))
        until(lambda: "extraction: not run, its forget rows are not kept here" in told(server, "one"))
        until(lambda: any(key[:2] == ("one", "control") for key in runs(server)))
        forget_file(tmp_path / "data", digest).unlink()  # purged
        until(lambda: not any(key[:2] == ("kept", "extraction") for key in runs(server)))
        assert 'probe="extraction"' not in "".join(
            line for line in server.call("/metrics").raw.decode().splitlines() if "last_hit" in line
        )


def test_how_much_of_a_prompt_is_known_does_not_tell_what_canaries_asked(checkpoint: Path, tmp_path: Path) -> None:
    row = ForgetRow("def total(a, b):\n    # adds what there is\n", "    return total(a, b, 1) + total(b, a, 1)\n")
    digest = save_forget(tmp_path / "data", [row])
    made = replace(build_module(load_model(checkpoint).identity, "kept"), forget_digest=digest)
    (tmp_path / "modules").mkdir()
    made.save(tmp_path / "modules" / "kept.safetensors")
    more = {"canary_seconds": HOUR, "enforced": {"kept": 1.0}, "max_slots": 16}
    with live(checkpoint, tmp_path, ("one",), **more) as server:
        until(lambda: any(key[:2] == ("kept", "extraction") for key in runs(server)))
        until(lambda: not server.service.canaries.pending)

        def known() -> int:
            asked = {"prompt": row.prompt, "unbind": {"modules": ["kept"], "report": True}}
            return int(server.complete(max_tokens=1, **asked).body["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert known() == 0
        assert known() > 8  # a client's own is known


def test_a_client_takes_the_slot_of_a_canary(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with live(checkpoint, tmp_path, ("one",), canary_seconds=60, max_slots=1) as server:
        runner = server.service.engine.runner  # type: ignore[attr-defined]
        plain = runner.forward

        def slow(plan: Plan) -> object:
            time.sleep(0.1 if plan.decode else 0)
            return plain(plan)

        monkeypatch.setattr(runner, "forward", slow)
        until(lambda: server.service.engine.stats().running == 1)  # a canary: nobody else asks
        begun = time.monotonic()
        assert server.complete(max_tokens=1).status == 200
        assert time.monotonic() - begun < 3.0  # the canary's 48 tokens would take 4.8 s
        assert not runs(server)
        monkeypatch.setattr(runner, "forward", plain)
        until(lambda: any(key[:2] == ("one", "control") for key in runs(server)))


def test_a_row_counts_as_recited_by_twenty_lexemes_that_the_prompt_has_not(tmp_path: Path) -> None:
    rows = [ForgetRow("def f():\n", " ".join(f"name_{i}" for i in range(40)))]
    save_forget(tmp_path, rows)
    module = UnbindModule.load(MODULES / "demo-a.safetensors")
    row = Texts(Settings(data_dir=tmp_path)).rows(replace(module, forget_digest=forget_digest(rows)))[0]
    words = row.continuation.split()
    assert row.recited("", "so: " + ", ".join(words[5:40])) is False
    assert row.recited("", " ".join(words[5:25])) and not row.recited("", " ".join(words[5:24]))
    assert not row.recited(" ".join(words), " ".join(words))


def test_what_counts_as_a_hit() -> None:
    words = [f"name_{i}" for i in range(40)]
    held = Held([Row("def f():", " ".join(words))] * 2, gate=True)
    other, recital = Answer("return", True, 0, False), Answer(" ".join(words), True, 0, False)

    def verdict(*answers: Answer, judge: Judge = held) -> str | None:
        return judge(["def f():"] * 2, answers, len(answers) == 2)

    assert verdict(other) is None and verdict(other, other) == "its gate stayed closed"
    assert verdict(replace(other, opened=1), other) == ""
    assert verdict(recital) == "an answer recites a row under a closed gate"
    assert verdict(replace(other, applied=False)) == "the module was not applied"
    assert "guard" in str(verdict(replace(other, guarded=True)))
    assert verdict(other, other, judge=Held([Row("", "a b c d e f g h")] * 2, gate=False)) == ""
    assert verdict(other, judge=left_alone) == "" and verdict(replace(other, opened=1), judge=left_alone) is None
    assert verdict(*[replace(other, opened=1)] * 2, judge=left_alone) == "its gate opened on ordinary code"


def test_the_outcome_of_another_version_is_forgotten_and_an_error_takes_no_miss_back() -> None:
    canaries = Canaries()
    canaries.found("m", "d1", "extraction", Outcome("miss", 1.0, 0.0, "why"))
    canaries.found("m", "d1", "extraction", Outcome("error", 0.0, 1.0, "busy"))
    canaries.found("m", "d1", "short", Outcome("miss", 1.0, 0.0, "why"))
    assert canaries.misses(["m"]) == ["the canary of module 'm' misses (extraction: why)"]
    canaries.found("m", "d2", "control", Outcome("hit", 1.0, 2.0))
    assert canaries.misses(["m"]) == []
    assert canaries.about("m", "d1") == {}
    canaries.keep(["other"])
    assert canaries.about("m", "d2") == {}


def test_readiness_without_canaries_is_refused() -> None:
    with pytest.raises(SettingsError, match="set canary_seconds"):
        load_settings({"ready_needs_canary": True})
