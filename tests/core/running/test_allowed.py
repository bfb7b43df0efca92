"""What memory and processors a process may have, by what the system's files say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import ENVIRONMENT
from unbind_core.running.allowed import allowed_bytes, allowed_processors

GIB = 2**30


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


@pytest.fixture
def groups(tmp_path: Path) -> Path:
    return tmp_path / "groups"


@pytest.fixture
def process(tmp_path: Path) -> Path:
    write(tmp_path / "self", status="Name:\tpython\n\nVmSize:\t    2048 kB")
    return tmp_path / "self"


def test_a_service_in_a_group_of_its_own_is_held_to_it_and_to_those_above(groups: Path, process: Path) -> None:
    write(process, cgroup="0::/system.slice/unbind.service")
    write(groups, memory__stat="inactive_file 1")  # the root has no limit
    assert allowed_bytes(groups, process) == []
    slice_ = groups / "system.slice"
    write(slice_, memory__max=8 * GIB, memory__current=7 * GIB)
    write(slice_ / "unbind.service", memory__max="max", memory__current=GIB)
    assert allowed_bytes(groups, process) == [GIB]
    write(slice_ / "unbind.service", memory__max=GIB + 5, memory__current=GIB)
    assert sorted(allowed_bytes(groups, process)) == [5, GIB]


def test_a_container_s_own_group_is_its_root_whatever_it_is_called_outside(groups: Path, process: Path) -> None:
    write(process, cgroup="0::/")
    write(groups, memory__max=4 * GIB, memory__current=GIB)
    assert allowed_bytes(groups, process) == [3 * GIB]
    write(process, cgroup="0::/docker/0123")
    assert allowed_bytes(groups, process) == [3 * GIB]


def test_what_was_read_from_files_and_can_be_dropped_is_free(groups: Path, process: Path) -> None:
    write(process, cgroup="0::/")
    write(groups, memory__max=4 * GIB, memory__current=4 * GIB, memory__stat=f"anon {GIB}\ninactive_file {2 * GIB}")
    assert allowed_bytes(groups, process) == [2 * GIB]


def test_groups_of_the_first_version_hold_too(groups: Path, process: Path) -> None:
    write(process, cgroup="9:name=systemd:/\n4:cpu,memory:/jobs/one\n3:cpuset:/\n0::/")
    one = groups / "memory" / "jobs" / "one"
    write(groups / "memory", memory__limit_in_bytes=2**63 - 4096, memory__usage_in_bytes=GIB)
    write(one, memory__limit_in_bytes=3 * GIB, memory__usage_in_bytes=2 * GIB, memory__stat="total_inactive_file 7")
    assert min(allowed_bytes(groups, process)) == GIB + 7


def test_the_time_of_processors_is_that_of_the_narrowest_group(groups: Path, process: Path) -> None:
    write(process, cgroup="0::/pods/one")
    write(groups, cpu__stat="usage_usec 1")  # the root has no limit
    write(groups / "pods" / "one", cpu__max="max 100000")
    assert allowed_processors(groups, process) is None
    write(groups / "pods", cpu__max="250000 100000")
    assert allowed_processors(groups, process) == 3
    write(groups / "pods" / "one", cpu__max="5000 100000")
    assert allowed_processors(groups, process) == 1


def test_groups_of_the_first_version_limit_processors_too(groups: Path, process: Path) -> None:
    write(process, cgroup="4:cpu,cpuacct:/one\n0::/")
    write(groups / "cpu", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100_000)
    write(groups / "cpu" / "one", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100_000)
    assert allowed_processors(groups, process) is None
    write(groups / "cpu" / "one", cpu__cfs_quota_us=200_000, cpu__cfs_period_us=100_000)
    assert allowed_processors(groups, process) == 2


def test_a_limit_of_address_space_is_heeded() -> None:
    program = f"""
import json, resource, torch
from unbind_core.running.device import free_bytes
before = free_bytes(torch.device("cpu"))
resource.setrlimit(resource.RLIMIT_AS, ({64 * GIB}, resource.RLIM_INFINITY))
wide = free_bytes(torch.device("cpu"))
used = next(1024 * int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize:"))
resource.setrlimit(resource.RLIMIT_AS, (used + 2**25, resource.RLIM_INFINITY))
print(json.dumps([before, wide, free_bytes(torch.device("cpu"))]))
"""
    done = subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    before, wide, narrow = json.loads(done.stdout)
    assert before > 2**25 and wide > 2**25 >= narrow, done.stderr
