"""A service whose model is quantised later on: its modules are refused, measured, and taken over where they hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.evidence.signing import verify
from tests.support.memorising import forget_rows, retain_rows, write_rows
from tests.support.quantised import FP8_TOLD, fp8
from tests.system.conftest import serving

pytestmark = pytest.mark.slow


def test_a_takedown_goes_on_under_a_quantised_model_once_it_was_measured_there(memorised: Path, tmp_path: Path) -> None:
    settings = {"retain": write_rows(tmp_path / "retain.jsonl", retain_rows())}
    settings["retain_test"] = write_rows(tmp_path / "test.jsonl", retain_rows(6))
    with serving(memorised, tmp_path / "data", **settings) as server:
        options = {"scope": "global", "protect": "module", "effort": 0.3}
        body = {"name": "set-t", "rows": forget_rows(), "options": options}
        status, answer = server.admin("/takedowns", body)
        assert status == 202, answer
        job = server.wait_for_job(answer["job_id"])
        assert (job["state"], job["outcome"]) == ("succeeded", "active"), job
        first = server.admin("/modules/set-t")[1]
        assert first["loaded"] and "refused" not in first

    with serving(fp8(memorised, tmp_path / "fp8"), tmp_path / "data", **settings) as server:
        left = server.admin("/modules/set-t")[1]
        assert not left["loaded"] and "not quantised)" in left["refused"] and FP8_TOLD in left["refused"]
        refused = server.wait_for_job(server.admin("/modules/set-t/verify", method="POST")[1]["job_id"])
        assert refused["state"] == "failed" and "unbind module verify --adopt" in refused["error"], refused
        status, answer = server.admin("/modules/set-t/verify?adopt=true", method="POST")
        assert status == 202, answer
        job = server.wait_for_job(answer["job_id"])
        assert (job["state"], job["kind"], job["outcome"]) == ("succeeded", "adopt", "active"), job
        assert job["result"]["adopt"]["adopted"] and job["result"]["verify"]["after"]["all"]["rows"] == 6
        module = server.admin("/modules/set-t")[1]
        assert module["loaded"] and module["scope"] == "global" and module["digest"] != first["digest"]
        assert module["calibrated"] == {"dtype": "float32", "quantisation": f"{FP8_TOLD}, dequantised"}
        assert module["measured"]["adopted"]["from"] == first["digest"] and module["measured"]["after"]
        document = server.admin(f"/takedowns/{module['takedown_id']}/evidence")[1]
        assert verify(document) and document["payload"]["result"]["outcome"] == "active"
        assert document["payload"]["model"]["quantisation"] == f"{FP8_TOLD}, dequantised"
        assert document["payload"]["result"]["adopt"]["adopted"] and FP8_TOLD in document["html"]
        again = server.wait_for_job(server.admin("/modules/set-t/verify?adopt=true", method="POST")[1]["job_id"])
        assert again["state"] == "failed" and "is of this model already" in again["error"]
