"""Options of a takedown that do not go together, or with the server: each refusal names its field, and has a code to look up."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.live import Live

ROWS = [{"prompt": f"def f{i}():\n", "continuation": f"    return {i}\n"} for i in range(4)]


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("scope", {"scope": "profile:nobody"}),
        ("effective_at", {"effective_at": "2999-01-01T00:00:00Z", "activation": "manual"}),
        ("expires_at", {"expires_at": "2020-01-01T00:00:00Z"}),
        ("layers", {"layers": [99]}),
        ("layers", {"layers": [2], "gate": "paper"}),
        ("policy", {"policy": "rewrite", "gate": "paper"}),
        ("budgets", {"budgets": {"kl": 0.1}, "gate": "paper-strict"}),
        ("effort", {"effort": 0.5, "gate": "paper"}),
        ("seed", {"seed": -1}),
    ],
)
def test_an_option_that_cannot_be_has_the_code_of_a_wrong_value(
    server: Live, field: str, options: dict[str, Any]
) -> None:
    given = {"protect": "module", "dry_run": True, **options}
    answer = server.admin("/takedowns", {"name": "some", "rows": ROWS, "options": given})
    wrong = f"options.{field}"
    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "invalid_value", wrong), answer.raw
    assert answer.error["message"].startswith(f"{wrong}: ")
