"""Which release this is and what it runs on: ``unbind_build_info`` and the metrics of the process itself."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

UNRELEASED = "unreleased"


def release_of(package: str) -> str:
    """The installed version of a package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return UNRELEASED


class _Build(Collector):
    def __init__(self, engine: str) -> None:
        packages = {"version": "unbind-server", "torch": "torch", "transformers": "transformers"}
        self._facts = {"engine": engine} | {label: release_of(package) for label, package in packages.items()}

    def collect(self) -> Iterable[Metric]:
        """1, and the facts as labels."""
        info = GaugeMetricFamily("unbind_build_info", "What runs here: always 1", labels=list(self._facts))
        info.add_metric(list(self._facts.values()), 1)
        yield info


def register_process(registry: CollectorRegistry, engine: str) -> None:
    """Add what this process is and uses. ``engine``: what computes in it."""
    registry.register(_Build(engine))
    ProcessCollector(registry=registry)
