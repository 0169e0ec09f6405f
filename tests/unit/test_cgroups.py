"""Limits of control groups for a process, as the kernel writes them into files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from optuna_hermes import _cgroups
from optuna_hermes.workers import _open_study, _worker_pool

V2 = "31 23 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
V1_MEMORY = "35 31 0:32 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
V1_CPU = "32 31 0:29 {root} /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct"
OTHER = "20 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw"

NO_LIMIT_V1 = str(2**63 - 4096)


@pytest.fixture
def host(tmp_path: Path) -> Any:
    """``host(groups, mounts, files)``: the root of a file system with these."""

    def make(groups: list[str], mounts: list[str], **folders: dict[str, str]) -> Path:
        own = tmp_path / "proc/self"
        own.mkdir(parents=True)
        (own / "cgroup").write_text("\n".join(groups) + "\n")
        (own / "mountinfo").write_text("\n".join([OTHER, *mounts]) + "\n")
        for folder, files in folders.items():
            path = tmp_path / "sys/fs/cgroup" / folder
            path.mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                (path / name).write_text(text + "\n")
        return tmp_path

    return make


def _v2(limit: str, taken: int, cached: int = 0, high: str = "max") -> dict[str, str]:
    return {
        "memory.max": limit,
        "memory.high": high,
        "memory.current": str(taken),
        "memory.stat": f"anon 1\ninactive_file {cached}\nfile 9",
    }


def _v1(limit: str, taken: int, cached: int = 0) -> dict[str, str]:
    return {
        "memory.limit_in_bytes": limit,
        "memory.usage_in_bytes": str(taken),
        "memory.stat": f"inactive_file 5\ntotal_inactive_file {cached}",
    }


def test_the_tightest_of_nested_groups_counts(host: Any) -> None:
    """A slice around the own group may leave less than that itself, which may have no limit."""
    root = host(
        ["0::/slice/job/step"],
        [V2],
        **{
            "slice": _v2("1000", 700, 100),
            "slice/job": _v2("5000", 10),
            "slice/job/step": _v2("max", 9),
        },
    )
    assert _cgroups.left_bytes(root) == 400
    assert _cgroups.available_bytes(root) == 400


def test_memory_above_which_a_group_is_slowed_down_does_not_count_as_left(host: Any) -> None:
    """Beyond ``memory.high`` the kernel makes processes wait for ever longer."""
    root = host(["0::/job"], [V2], job=_v2("5000", 100, high="1000"))
    assert _cgroups.left_bytes(root) == 900


def test_without_a_limit_the_machine_counts(host: Any) -> None:
    """``max``, or no file at all."""
    root = host(["0::/job"], [V2], job=_v2("max", 9))
    assert _cgroups.left_bytes(root) is None
    available = psutil.virtual_memory().available
    assert _cgroups.available_bytes(root) == pytest.approx(available, rel=0.2)
    assert _cgroups.left_bytes(root / "nowhere") is None


def test_more_than_the_limit_is_taken(host: Any) -> None:
    """A limit that was lowered leaves nothing, not less."""
    assert _cgroups.left_bytes(host(["0::/job"], [V2], job=_v2("100", 900))) == 0


def test_version_1_counts_too(host: Any) -> None:
    """Each controller has a hierarchy, and a group's path there; no limit is a huge number."""
    root = host(
        ["4:memory:/jobs/7", "3:cpu,cpuacct:/jobs", "1:name=systemd:/x", "0::/"],
        [V1_MEMORY.format(root="/"), V1_CPU.format(root="/")],
        **{
            "memory": _v1(NO_LIMIT_V1, 5000),
            "memory/jobs": _v1("3000", 1000, 500),
            "memory/jobs/7": _v1(NO_LIMIT_V1, 900),
            "cpu,cpuacct": {"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"},
            "cpu,cpuacct/jobs": {"cpu.cfs_quota_us": "100000", "cpu.cfs_period_us": "100000"},
        },
    )
    assert _cgroups.left_bytes(root) == 2500
    assert _cgroups.usable_cpus(root) == 1


@pytest.mark.parametrize(
    ("group", "mount_root"),
    [("/docker/ab", "/docker/ab"), ("/", "/"), ("/../ab", "/"), ("/docker/ab", "/elsewhere")],
)
def test_in_a_container_the_group_is_at_the_mount(host: Any, group: str, mount_root: str) -> None:
    """Whatever path the host, or the container, knows it by."""
    mounts = [V1_MEMORY.format(root=mount_root)]
    root = host([f"4:memory:{group}"], mounts, memory=_v1("1000", 300))
    assert _cgroups.left_bytes(root) == 700


@pytest.mark.parametrize(
    ("quota", "expected"), [("max 100000", 64), ("250000 100000", 2), ("50000 100000", 1)]
)
def test_processors_follow_the_quota(
    host: Any, monkeypatch: pytest.MonkeyPatch, quota: str, expected: int
) -> None:
    """As many as it keeps busy, and no fewer than one."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    assert _cgroups.usable_cpus(host(["0::/job"], [V2], job={"cpu.max": quota})) == expected


def test_processors_follow_the_affinity(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``taskset`` or SLURM set it."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 7})
    assert _cgroups.usable_cpus(host(["0::/"], [V2])) == 3


def test_live_processes_and_threads_follow_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container of 2 GB on a large machine holds four workers, and one of four processors
    shares these among its slots.
    """
    monkeypatch.setattr(_open_study, "available_bytes", lambda: 2_000_000_000)
    assert _open_study.most_alive(["cpu:0", "cpu:1"]) == 4
    monkeypatch.setattr(_worker_pool, "usable_cpus", lambda: 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert _worker_pool._environment("cpu:2")["OMP_NUM_THREADS"] == "2"


def test_sets_of_text_have_one_order_in_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary that is made of a set is the same when its trial comes back."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert _worker_pool._environment("cpu:1")["PYTHONHASHSEED"] == "0"
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert _worker_pool._environment("cpu:1")["PYTHONHASHSEED"] == "7"
