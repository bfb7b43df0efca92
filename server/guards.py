"""Records and files -> the guards that apply here. They hold for any model, so that a server without one loads them too."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from server.logs import change
from server.registry.lifecycle import demanded
from server.registry.modules import Modules
from server.registry.objects import DamagedObject, ObjectStore
from server.registry.tables import ModuleState
from unbind_core.guard.book import GuardBook
from unbind_core.guard.index import GuardIndex, Secret

_MOST_TOLD = 600  # characters of an error
log = logging.getLogger("unbind.guards")


@dataclass(frozen=True)
class Guards:
    """What was found at one look: the guards that are loaded, all records of live ones, and why some could not be loaded."""

    book: GuardBook
    records: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)

    def about(self, name: str) -> dict[str, Any]:
        """The takedown of a guard and its notice's reference, as those are told whose answer it ended."""
        record = self.records.get(name, {})  # it may have been retired while the answer ran
        return {"module": name, "takedown": record.get("takedown_id"), "reference": record.get("reference")}

    @cached_property
    def absent(self) -> dict[str, dict[str, Any]]:
        """Name -> record of the guards that should be loaded and cannot be."""
        loaded = self.book.names
        return {name: record for name, record in self.records.items() if name not in loaded}

    @cached_property
    def shadow(self) -> frozenset[str]:
        """The loaded guards that only count: in shadow, or made to report."""
        return frozenset(name for name in self.book.names if not _acts(self.records[name]))

    def enforced(self, scopes: Collection[str]) -> list[str]:
        """The active guards whose records say that they apply in one of these scopes, loaded or not."""
        return [name for scope in scopes for name in self._by_scope.get(scope, ())]

    @cached_property
    def _by_scope(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name, record in self.records.items():
            if _acts(record) and demanded(record, [record["scope"]]):
                found.setdefault(record["scope"] or "", []).append(name)
        return found

    def measured(self, scopes: Collection[str]) -> list[str]:
        """Those that only count and whose scope is one of these, or that have none and count everywhere."""
        return [name for name in self.shadow if (self.records[name]["scope"] or "") in ("", *scopes)]


class GuardStore:
    """Reads each object once."""

    def __init__(self, objects: ObjectStore, records: Modules, secret: Secret) -> None:
        self._objects, self._records, self._secret = objects, records, secret
        self._read: dict[str, GuardIndex] = {}
        self.last = Guards(GuardBook.of(secret))  # what was found at the last look

    def scan(self) -> Guards:
        """Look at the records. Never raises for what a file holds; SQLAlchemyError where the database is gone."""
        live = {str(record["name"]): record for record in self._records.live_guards()}
        if live == self.last.records and not self.last.problems:
            return self.last
        loaded: dict[str, GuardIndex] = {}
        problems: dict[str, str] = {}
        for name, record in live.items():
            try:
                loaded[name] = self._of(record)
            except Exception as error:  # noqa: BLE001 - of one guard; it must not keep the others away
                where = f"guard '{name}' ({record['id']})"
                problems[where] = str(error)[:_MOST_TOLD]
                if self.last.problems.get(where) != problems[where]:
                    log.error("%s cannot be loaded: %s", where, error)
        self._read = {index.digest: index for index in loaded.values()}
        book = self.last.book
        if {name: index.digest for name, index in loaded.items()} != _digests(book):
            book = GuardBook.of(self._secret, loaded.values(), book)
            log.info("guards: %s", change(_labels(self.last.book), _labels(book)))
        self.last = Guards(book, live, problems)
        return self.last

    def _of(self, record: Mapping[str, Any]) -> GuardIndex:
        digest, file = str(record["digest"]), str(record["file"])
        index = self._read.get(digest)
        if index is None:
            index = GuardIndex.from_bytes(bytes(self._objects.soon(file, digest)), file, self._secret)
        if index.name != record["name"]:
            raise DamagedObject(f"{file}: holds the guard '{index.name}'; the record was changed")
        return index


def _acts(record: Mapping[str, Any]) -> bool:
    return record["state"] != ModuleState.SHADOW and record.get("action") != "report"


def _labels(book: GuardBook) -> list[str]:
    return [f"{name}@{digest[:12]}" for name, digest in _digests(book).items()]


def _digests(book: GuardBook) -> dict[str, str]:
    return {name: index.digest for name, index in book.indexes.items()}
