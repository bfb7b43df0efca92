"""What ``unbind bench fleet`` counts against a fleet: a request without what it must have, and how late a change held."""

from __future__ import annotations

from server.bench.fleet.clients import Answer, Demand, Journal, known

GONE = (20.0, 30.0)  # when the registry was away


def answer(sent: float, *applied: str, status: int = 200) -> Answer:
    return Answer(sent, sent + 0.1, status, frozenset(applied), whole=True)


def judged(demand: Demand, *answers: Answer) -> tuple[float, float]:
    found = Journal(list(answers), [demand]).judged([GONE])
    return found["holds_seconds"], found["suspended_seconds"]


def test_a_request_that_ran_without_its_module_shows_how_late() -> None:
    demand = Demand("m", since=1.0, leaving=10.0, gone=11.0)
    assert judged(demand, answer(0.5), answer(2.0, "m"), answer(9.95)) == (0.0, 0.0)
    assert judged(demand, answer(4.0), answer(2.5)) == (3.0, 0.0)
    assert judged(demand, answer(4.0, status=503)) == (0.0, 0.0)  # refused, not done without
    assert judged(demand, answer(4.0, "m:guard")) == (3.0, 0.0)  # the guard is not the module


def test_a_module_that_stays_after_its_suspension_shows_how_long() -> None:
    demand = Demand("m", since=1.0, leaving=10.0, gone=11.0)
    assert judged(demand, answer(10.5, "m"), answer(12.5, "m")) == (0.0, 1.5)


def test_nobody_can_know_of_a_change_while_the_registry_is_away() -> None:
    assert known(5.0, [GONE]) == 5.0 and known(31.0, [GONE]) == 31.0
    assert known(19.0, [GONE]) == 30.0  # made before, but not yet looked at
    assert judged(Demand("m", since=19.5), answer(25.0)) == (0.0, 0.0)
    assert judged(Demand("m", since=19.5), answer(33.0)) == (3.0, 0.0)
    assert judged(Demand("m", since=10.0), answer(25.0)) == (15.0, 0.0)  # known long before: it must be kept
