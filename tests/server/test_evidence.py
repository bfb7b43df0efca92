"""Evidence holds what was done, shows it without a script, and any change to it is found offline."""

from __future__ import annotations

import base64
import copy
import json
import stat
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from server.cli import build
from server.evidence.bundle import evidence
from server.evidence.page import page
from server.evidence.signing import PRIME, SMALL_ORDER, BadEvidence, fingerprint, read, signing_key, verify
from server.registry.database import open_database
from server.registry.files import job_dir, save_json
from server.registry.registry import Registry
from server.registry.tables import JobState
from server.settings import Settings
from tests.server.registry.test_registry import claim, made_by, submit
from unbind_core.evaluation.bounds import mean_bound, share_bound

HOSTILE = "<script>alert(1)</script> & \"quotes\" 'single'"
TRIAL = {
    "layer": 2,
    "quantile": 0.9,
    "kappa": 3.0,
    "forget_gain": 1.5,
    "verdict": "selected",
    "retain_kl": 0.004,
    "retain_nll_increase": -0.001,
    "retain_bleu_drop": 0.0,
}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path / "data")


@pytest.fixture
def document(settings: Settings) -> dict[str, Any]:
    """The evidence of a finished takedown whose rows try to be markup."""
    registry = Registry(open_database(settings.database_address))
    job_id = submit(registry, notice={"claimant": HOSTILE})
    held = claim(registry)
    folder = job_dir(settings.data_dir, job_id) / "attempt-1"
    other = {**TRIAL, "layer": 3, "kappa": 30.0, "forget_gain": -0.5, "verdict": "over KL budget"}
    save_json(folder / "report.json", {"selected": TRIAL, "scan": [TRIAL, other], "budgets": {"kl": 0.01}})
    sample = {"prompt": HOSTILE, "protected": HOSTILE, "before": HOSTILE, "after": "pass"}
    histograms = {"low": -1.0, "high": 2.0, "threshold": 0.5, "counts": {"forget": [0, 5, 9], "retain": [90, 8, 0]}}
    save_json(folder / "exhibits.json", {"histograms": histograms, "samples": [sample]})
    table = {"before": {"all": {"f_bleu": 0.9, "rows": 3}}, "after": {"all": {"f_bleu": 0.01, "rows": 3}}}
    for stage in ("fit", "verify"):
        registry.jobs.stage_done(held, stage, {"seconds": 1.0, "folder": "attempt-1", "result": {}})
    registry.jobs.finish(held, JobState.SUCCEEDED, 1.0, result={"verify": table}, module=made_by(held))
    made = evidence(registry, settings, str(held.takedown_id), {"name": "tiny", "fingerprint": "f" * 64})
    registry.close()
    return made


class Reader(HTMLParser):
    """The elements of a page and where they point."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.links: list[str] = []
        self.texts: list[str] = []

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.links += [str(value) for name, value in attributes if name in ("src", "href", "srcset", "data")]


def test_the_page_shows_plots_and_tables_and_runs_and_fetches_nothing(document: dict[str, Any]) -> None:
    page = Reader()
    page.feed(document["html"])
    assert page.elements.count("svg") == 3 and page.elements.count("pre") == 3
    assert "script" not in page.elements and page.links == []
    assert "0.004" in document["html"] and "threshold" in document["html"] and "takedown.submit" in document["html"]
    actions = [row["action"] for row in document["payload"]["audit"]]
    assert {"takedown.submit", "module.add", "module.activate", "job.succeeded"} <= set(actions)


def test_the_page_tells_of_gates_with_memory(document: dict[str, Any]) -> None:
    costs = {"kl": 0.001, "nll": 0.002, "bleu": 0.0, "open_rate": 0.001}
    level = {
        "gate": "network",
        "width": 4711,
        "tau_close": 0.5,
        "cost": {"cautious": costs},
        "verdict": "chosen",
    }
    payload = copy.deepcopy(document["payload"])
    payload["report"] = {"selected": level, "scan": [], "levels": [level], "budgets": dict.fromkeys(costs, 0.005)}
    payload["exhibits"]["histograms"]["score"] = "evidence <b>"
    html = page(payload)
    assert html.count("<svg") == 2 and "4711" in html and "evidence &lt;b&gt;" in html and "0.0020 of 0.005" in html


def test_the_page_says_what_rows_that_chose_nothing_cost(document: dict[str, Any]) -> None:
    assert "<h2>Certificate</h2>" not in document["html"]
    payload = copy.deepcopy(document["payload"])
    certificate = {"touched": share_bound(0, 150).to_json(), "kl": mean_bound([0.0] * 150, ways=4).to_json()}
    payload["report"]["certificate"] = {**certificate, "level": 0.95, "cap": 1.0, "over": []}
    assert "On the rows themselves" not in document["html"]
    costs = {"bounds": {"kl": 0.001}}  # as reports called the estimates once
    payload["report"]["selected"] = {"forget_open_rate": 0.875, "cost": costs}
    group = {"ways": "prefix-64, fence", "rows": 12, "spans_50": 0}
    payload["result"]["verify"]["after"]["reported_by"] = group
    html = page(payload)
    assert (
        "0 of 150 retain rows that chose nothing were touched: at most 2.0 % of such rows are (95 %, clopper-pearson)"
        in html
    )
    assert "the gate was open at 87.5 % of the positions" in html
    assert "clopper-pearson<td>150<td>0.95" in html and "hoeffding<td>150<td>0.95" in html
    assert "reported_by<td>ways<td><td>prefix-64, fence" in html


def ended(settings: Settings, options: dict[str, Any], result: dict[str, Any]) -> str:
    """The page of a takedown whose job ended so, without a module."""
    registry = Registry(open_database(settings.database_address))
    submit(registry, "other", options=options)
    held = claim(registry)
    registry.jobs.finish(held, JobState.SUCCEEDED, 1.0, result=result)
    made = evidence(registry, settings, str(held.takedown_id), {"name": "tiny", "fingerprint": "f" * 64})
    registry.close()
    return str(made["html"])


def test_the_page_of_rows_that_are_not_recited_shows_the_check(document: dict[str, Any], settings: Settings) -> None:
    assert "<h2>The check</h2>" not in document["html"]  # before and after say it there
    check = {"rows": 7, "f_bleu": 0.0321, "f_bleu_fim": None, "spans_50": 0, "spans_100": 0, "mean_recovery": 4.25}
    result = {"outcome": "nothing_to_remove", "check": {**check, "extracted": 0, "memorised": False}}
    html = ended(settings, {}, result)
    _, shown = html.split("<h2>The check</h2>")
    for label, value in (
        ("asked for", "7"),
        ("came back", "0"),
        ("F-BLEU", "0.0321"),
        ("recovery in per cent", "4.25"),
    ):
        line = next(line for line in shown.splitlines() if line.startswith("<tr>") and label in line)
        assert line.endswith(f"<td>{value}")
    assert "fill in the middle" not in shown and "nothing_to_remove" in html


def test_the_page_shows_the_remark_of_the_job_and_a_fit_of_fewer_steps(
    document: dict[str, Any], settings: Settings
) -> None:
    assert "remark" not in document["html"] and "training steps" not in document["html"]
    remark = "short: the module is within its budgets, but forgets less than was aimed at (F-BLEU <b> 0.3)"
    html = ended(settings, {"effort": 0.1}, {"outcome": "calibrated", "remark": remark})
    assert f"<tr><th>remark of the job<td>{remark.replace('<b>', '&lt;b&gt;')}" in html
    assert "<tr><th>share of a fit&#39;s training steps<td>0.1" in html


def test_every_text_of_the_document_is_shown_as_text(document: dict[str, Any]) -> None:
    def hostile(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: hostile(inner, name) for name, inner in value.items()}
        if isinstance(value, list):
            return [hostile(inner) for inner in value]
        return HOSTILE if isinstance(value, str) and key not in ("state", "in_force") else value

    payload = hostile(document["payload"])
    payload["named_by"] = [HOSTILE]
    payload["takedown"]["notice"][HOSTILE] = [HOSTILE]
    payload["report"]["levels"] = [{"gate": HOSTILE, "verdict": HOSTILE, "forgot": {"f_bleu_left": {HOSTILE: 0.5}}}]
    payload["exhibits"]["histograms"]["score"] = HOSTILE
    payload["exhibits"]["histograms"]["counts"][HOSTILE] = [1]
    payload["result"]["verify"]["after"][HOSTILE] = {HOSTILE: HOSTILE}
    shown = Reader()
    shown.feed(page(payload))
    expected = Reader()
    expected.feed(document["html"])
    assert set(shown.elements) <= set(expected.elements) and "script" not in shown.elements
    assert "".join(shown.texts).count("<script>alert(1)</script>") >= 30
    assert "".join(shown.texts).count("<script>alert(1)</script>") == page(payload).count("&lt;script&gt;")


def test_any_change_is_found(document: dict[str, Any]) -> None:
    signer = verify(json.loads(json.dumps(document)))
    assert verify(document, signer.upper()) == signer

    def changed(*path: Any, value: Any = "x") -> dict[str, Any]:
        other = copy.deepcopy(document)
        target: Any = other
        for step in path[:-1]:
            target = target[step]
        target[path[-1]] = value
        return other

    for bad in (
        changed("html"),
        changed("payload", "takedown", "row_count", value=4),
        changed("payload", "audit", value=[]),
        changed("extra"),
        changed("format"),
        changed("signature", "value"),
        changed("signature", "algorithm"),
        changed("signature", "public_key", value="AAAA"),
        {},
        [],
        "text",
        None,
    ):
        with pytest.raises(BadEvidence):
            verify(bad)
    with pytest.raises(BadEvidence, match="another key"):
        verify(document, "0" * 64)


def in_other_words(document: dict[str, Any], **signature: Any) -> dict[str, Any]:
    return {**document, "signature": {**document["signature"], **signature}}


def test_a_forged_fingerprint_is_found_though_nobody_asked_for_one(document: dict[str, Any]) -> None:
    with pytest.raises(BadEvidence, match="fingerprint is not that of the key"):
        verify(in_other_words(document, fingerprint="0" * 64))


@pytest.mark.parametrize("field", ["signed_at", "key", "Algorithm"])
def test_a_signature_has_exactly_its_fields(document: dict[str, Any], field: str) -> None:
    with pytest.raises(BadEvidence, match="signature: fields"):
        verify(in_other_words(document, **{field: "x"}))


@pytest.mark.parametrize("field", ["public_key", "value"])
def test_base64_with_spare_bits_padding_or_breaks_is_refused(document: dict[str, Any], field: str) -> None:
    text = document["signature"][field]
    body, padding = text.rstrip("="), text[len(text.rstrip("=")) :]
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    spare = body[:-1] + alphabet[alphabet.index(body[-1]) + 1] + padding
    assert base64.b64decode(spare) == base64.b64decode(text)  # the same bytes, written in another way
    for other in (spare, f"{text}=", f"{text}\n", f" {text}", text.rstrip("="), 5, None):
        with pytest.raises(BadEvidence, match=f"signature.{field}"):
            verify(in_other_words(document, **{field: other}))


def test_what_a_second_reader_would_read_otherwise_is_refused(document: dict[str, Any]) -> None:
    text = json.dumps(document)
    assert verify(read(text)) == verify(read(text.encode())) == document["signature"]["fingerprint"]
    for forged, says in (
        (text.replace('"payload": {', '"payload": {"takedown": "another"}, "payload": {', 1), "'payload' comes twice"),
        (text.replace('"row_count": 3', '"row_count": 4, "row_count": 3', 1), "'row_count' comes twice"),
        (text.replace('"row_count": 3', '"row_count": 4, "row_co\\u0075nt": 3', 1), "'row_count' comes twice"),
        (text.replace('"f_bleu": 0.01,', '"f_bleu": 0.01000000000000000000001,', 1), "not written as it was signed"),
        (text.replace('"f_bleu": 0.01,', '"f_bleu": NaN,', 1), "NaN is not JSON"),
        ("\ufeff" + text, "not JSON"),
        ("[" * 100_000, "not JSON"),
    ):
        assert forged != text
        with pytest.raises(BadEvidence, match=says):
            read(forged)
    with pytest.raises(BadEvidence, match="not JSON"):
        read(text.encode("utf-16"))


@pytest.mark.parametrize("sign", [0, 1 << 255])
@pytest.mark.parametrize("y", [*SMALL_ORDER, PRIME, PRIME + 1, PRIME + 3, 2**255 - 1])
def test_a_key_under_which_anything_seems_signed_is_refused(document: dict[str, Any], y: int, sign: int) -> None:
    point = (y | sign).to_bytes(32, "little")
    public, nothing = base64.b64encode(point).decode(), base64.b64encode(point + bytes(32)).decode()
    with pytest.raises(BadEvidence, match=r"signature\.public_key: not a point"):
        verify(in_other_words(document, public_key=public, fingerprint=fingerprint(point), value=nothing))
    with pytest.raises(BadEvidence, match=r"signature\.value: not a point"):
        verify(in_other_words(document, value=nothing))


def test_every_point_of_small_order_is_known() -> None:
    """Doubled three times each is neutral, by the curve's own arithmetic; there are eight of them, in pairs of one y."""
    d = -121665 * pow(121666, -1, PRIME) % PRIME
    points = 0
    for y in SMALL_ORDER:
        square = (y * y - 1) * pow(d * y * y + 1, -1, PRIME) % PRIME
        root = pow(square, (PRIME + 3) // 8, PRIME)
        x = root if root * root % PRIME == square else root * pow(2, (PRIME - 1) // 4, PRIME) % PRIME
        assert x * x % PRIME == square
        points += 1 if x == 0 else 2
        at = x, y
        for _ in range(3):
            product = d * at[0] * at[0] * at[1] * at[1]
            at = (
                2 * at[0] * at[1] * pow(1 + product, -1, PRIME) % PRIME,
                (at[1] * at[1] + at[0] * at[0]) * pow(1 - product, -1, PRIME) % PRIME,
            )
        assert at == (0, 1)
    assert points == 8


def test_the_command_checks_a_file_offline(document: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "evidence.json"
    file.write_text(json.dumps(document))
    signer = document["signature"]["fingerprint"]

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(build(), ["evidence", "verify", str(file), *arguments])

    assert json.loads(run("--json").output) == {"genuine": True, "signed_by": signer}
    assert run("--signed-by", signer).exit_code == 0 and run("--signed-by", "00").exit_code == 1
    file.write_text(json.dumps({**document, "html": "x"}))
    assert run().exit_code == 1
    for forged in ("not json", json.dumps(document).replace('"payload": {', '"payload": {}, "payload": {', 1)):
        file.write_text(forged)
        assert run().exit_code == 1


def test_all_who_make_the_key_at_once_get_the_same(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        keys = {key.private_bytes_raw() for key in pool.map(signing_key, [tmp_path / "d"] * 32)}
    assert len(keys) == 1 and [path.name for path in (tmp_path / "d").iterdir()] == ["evidence.key"]


def test_the_key_is_made_once_and_its_owner_s_alone(tmp_path: Path) -> None:
    first, second = signing_key(tmp_path / "d"), signing_key(tmp_path / "d")
    assert first.private_bytes_raw() == second.private_bytes_raw()
    assert stat.S_IMODE((tmp_path / "d" / "evidence.key").stat().st_mode) == 0o600
