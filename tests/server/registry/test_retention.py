"""Forget rows are kept exactly as long as a takedown has them: under races, refusals, deaths and age."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest

from server.api.admin.bodies import TakedownFields
from server.api.admin.intake import from_json
from server.api.admin.takedowns import Asked, _submit
from server.guarding import guard_secret
from server.registry import retention
from server.registry.audit import Actor
from server.registry.files import job_dir
from server.registry.objects import ObjectStore
from server.registry.private.files import TakedownFiles
from server.registry.refusals import NameTaken
from server.registry.registry import Registry
from server.registry.retention import DAY, Retention
from server.settings import Settings

ADMIN = Actor("admin", "test")
HOUR = 3600.0


class Shop:
    """What a POST asks of a server, and POSTs to it."""

    def __init__(self, registry: Registry, settings: Settings) -> None:
        self.registry, self.settings, self.files = registry, settings, TakedownFiles(settings)
        self.served: Any = SimpleNamespace(
            settings=settings,
            registry=registry,
            model_fingerprint="model",
            guard_secret=guard_secret(settings),
            objects=ObjectStore(settings.published_store),
        )

    def post(self, name: str, rows: str = "shared", **options: Any) -> str:
        """The takedown's id."""
        fields = TakedownFields(name=name, options={"protect": "module", **options})
        intake = from_json([{"prompt": f"def {rows}_{number}():", "continuation": " pass"} for number in range(3)])
        job, _ = _submit(self.served, Asked(fields, options, intake), None, ADMIN, None)
        return str(job["takedown_id"])

    def kept(self, takedown: str) -> bool:
        return self.files.has_forget(self.registry.takedowns.get(takedown)["forget_digest"])

    def cancel(self, takedown: str) -> None:
        for job in self.registry.takedowns.get(takedown)["jobs"]:
            self.registry.jobs.request_cancel(job, ADMIN, time.time())


@pytest.fixture(params=["data", "private"])
def shop(request: pytest.FixtureRequest, registry: Registry, tmp_path: Path) -> Shop:
    private = {"private_store": str(tmp_path / "private"), "private_key": "5a" * 32}
    return Shop(registry, Settings(data_dir=tmp_path / "data", **(private if request.param == "private" else {})))


def before(call: Callable[..., Any], first: Callable[[], object]) -> Callable[..., Any]:
    """The call, and something else just before it."""

    def called(*arguments: Any, **named: Any) -> Any:
        first()
        return call(*arguments, **named)

    return called


def test_of_two_posts_of_the_same_rows_the_refused_one_leaves_the_other_s(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    takedowns, both = shop.registry.takedowns, Barrier(2)
    monkeypatch.setattr(takedowns, "submit", before(takedowns.submit, both.wait))  # both have passed every check so far

    def post(_: int) -> str:
        try:
            return shop.post("m")
        except NameTaken:
            return "refused"

    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(post, range(2)))
    (accepted,) = set(answers) - {"refused"}
    assert "refused" in answers and shop.kept(accepted)


def test_a_purge_while_the_same_rows_are_posted_again_leaves_them(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    takedowns, old = shop.registry.takedowns, shop.post("old")
    shop.cancel(old)

    def purge() -> None:
        retention.purge(shop.registry, shop.settings, old, ADMIN)

    monkeypatch.setattr(takedowns, "submit", before(takedowns.submit, purge))
    assert shop.kept(shop.post("new"))


def test_what_is_refused_at_the_last_leaves_no_rows(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    takedowns = shop.registry.takedowns
    submit = takedowns.submit
    monkeypatch.setattr(takedowns, "submit", before(submit, lambda: setattr(takedowns, "submit", submit) or taken()))

    def taken() -> None:
        shop.post("m", "others")

    with pytest.raises(NameTaken):
        shop.post("m")
    (accepted,) = takedowns.newest()
    assert shop.files.kept_forget() == {accepted["forget_digest"]}


def test_what_cannot_be_deleted_keeps_nothing_else_and_is_not_called_purged(registry: Registry, tmp_path: Path) -> None:
    shop = Shop(registry, Settings(data_dir=tmp_path / "data", forget_retention_days=1e-9))
    posted = [shop.post(name, name) for name in ("a", "b", "c")]
    for takedown in posted:
        shop.cancel(takedown)
    (job,) = registry.takedowns.get(posted[0])["jobs"]
    folder = job_dir(shop.settings.data_dir, job)
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")  # as what the system refuses to delete
    kept = Retention(registry, shop.settings)
    assert kept.purge_old(0.0) == []
    with pytest.raises(OSError, match="symbolic link"):
        kept.purge_old(HOUR)
    assert [registry.takedowns.get(takedown)["purged_at"] is None for takedown in posted] == [True, False, False]
    assert not shop.kept(posted[1]) and not shop.kept(posted[2])
    folder.unlink()
    assert kept.purge_old(HOUR + 1) == [posted[0]] and not shop.kept(posted[0])


def test_rows_that_are_too_old_by_a_clock_that_is_ahead_for_less_than_an_hour_are_kept(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = Shop(registry, Settings(data_dir=tmp_path / "data", forget_retention_days=30))
    posted, kept = shop.post("m"), Retention(registry, shop.settings)
    shop.cancel(posted)
    right = time.time()
    for now, ahead in ((0.0, 31), (HOUR - 1, 31), (HOUR, 0), (HOUR + 1, 31), (2 * HOUR, 31)):
        monkeypatch.setattr(time, "time", lambda ahead=ahead: right + ahead * DAY)
        assert kept.purge_old(now) == [] and shop.kept(posted)
    assert kept.purge_old(2 * HOUR + 1) == [posted] and not shop.kept(posted)


def test_rows_of_a_post_that_died_go_once_they_were_found_without_a_takedown_for_a_day(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    accepted, sweeper = shop.post("m"), Retention(shop.registry, shop.settings)

    def die() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shop.registry.takedowns, "submit", before(shop.registry.takedowns.submit, die))
        with pytest.raises(KeyboardInterrupt):
            shop.post("died", "other")
    (left,) = shop.files.kept_forget() - {shop.registry.takedowns.get(accepted)["forget_digest"]}
    assert sweeper.sweep(0) == [] and shop.files.has_forget(left)
    again = shop.post("again", "other")
    assert sweeper.sweep(2 * DAY) == [] and shop.kept(again)  # it has a takedown by now
    shop.cancel(again)
    shop.registry.takedowns.purge(again, lambda *_: None, ADMIN, time.time())  # as a store that lost the deletion
    assert sweeper.sweep(3 * DAY) == [] and sweeper.sweep(4 * DAY - 1) == []
    assert sweeper.sweep(4 * DAY) == [left]
    assert not shop.files.has_forget(left) and shop.kept(accepted)


def test_a_server_looks_for_rows_without_a_takedown_once_an_hour(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[None] = []
    kept = Retention(shop.registry, shop.settings)
    monkeypatch.setattr(kept, "sweep", before(kept.sweep, lambda: looks.append(None)))
    for _ in range(3):
        kept.go_on()
    assert len(looks) == 1 and kept._next - time.monotonic() > 3000
    kept._next = time.monotonic()
    kept.go_on()
    assert len(looks) == 2
