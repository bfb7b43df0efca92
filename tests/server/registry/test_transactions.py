"""Who reads the registry and who changes it: neither holds the other up, whatever becomes of them."""

from __future__ import annotations

from server.registry import jobs, records, takedowns
from server.registry.lifecycle import Action
from server.registry.registry import Registry
from tests.server.registry.test_modules import act, make
from tests.server.registry.test_registry import claim, submit


def test_who_reads_holds_up_no_change(registry: Registry) -> None:
    record, job_id = make(registry), submit(registry, "next", 1.0)
    with registry.transactions.look() as session:
        found = jobs._find(session, job_id)
        takedowns._find(session, str(found.takedown_id))
        records.find(session, "m")
        assert claim(registry, now=2.0).job_id == job_id
        assert act(registry, record, Action.SUSPEND)["state"] == "suspended"
