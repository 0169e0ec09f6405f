"""Memory and processors that the kernel leaves to this process: by control groups and affinity.

In a container, a job of SLURM or a slice of systemd that is less than the machine has.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")


def available_bytes(root: Path = _ROOT) -> int:
    """Memory that this process and its children can still take."""
    import psutil  # here: a caller that only counts cores is quicker without

    return min([psutil.virtual_memory().available, *_left_bytes(root)])


def left_bytes(root: Path = _ROOT) -> int | None:
    """Memory that control groups leave to this process; None if they bound nothing."""
    return min(_left_bytes(root), default=None)


def usable_cpus(root: Path = _ROOT) -> int:
    """Processors that this process can keep busy, at least one."""
    quotas = [int(quota) for quota in _quotas(root)]
    return max(1, min([len(os.sched_getaffinity(0)), *quotas]))


def _left_bytes(root: Path) -> list[int]:
    """Bytes left in each control group that bounds memory."""
    # Cached files count as taken there but go when others need the room.
    found = []
    for folder in _folders(root, "memory"):
        # Above memory.high the kernel slows the group down, until it has freed some.
        limits = [_number(folder / name) for name in ("memory.max", "memory.high")]
        taken = _number(folder / "memory.current")
        cached = _entry(folder / "memory.stat", "inactive_file")
        if taken is None:  # version 1
            limits = [_number(folder / "memory.limit_in_bytes")]
            taken = _number(folder / "memory.usage_in_bytes")
            cached = _entry(folder / "memory.stat", "total_inactive_file")
        found += [
            max(0, limit - taken + cached)
            for limit in limits
            if limit is not None and taken is not None
        ]
    return found


def _quotas(root: Path) -> Iterator[float]:
    """Processors' worth of time that each control group grants."""
    for folder in _folders(root, "cpu"):
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        if not quota:  # version 1
            quota = _text(folder / "cpu.cfs_quota_us")
            period = _text(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period):
            yield int(quota) / int(period)


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """The folder of this process's control group, and those of the groups around it."""
    # Both versions may be there, each with some of the controllers.
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        for mount_root, mounted in _mounts(root, controller if controllers else None):
            # A path that is not below the mount is seen from outside of this container.
            below = os.path.relpath(group, mount_root)
            inside = not below.startswith("..") and ".." not in Path(group).parts
            folder = mounted / below if inside else mounted
            yield folder
            yield from (each for each in folder.parents if each.is_relative_to(mounted))


def _mounts(root: Path, controller: str | None) -> Iterator[tuple[str, Path]]:
    """Roots and mount points of a version 1 hierarchy, or of version 2 without a controller."""
    for line in _text(root / "proc/self/mountinfo").splitlines():
        fields, _, rest = line.partition(" - ")
        mount_root, mounted = fields.split()[3:5]
        kind, *_, options = rest.split()
        of_version_1 = kind == "cgroup" and controller in options.split(",")
        if of_version_1 or (kind == "cgroup2" and controller is None):
            yield mount_root, root / mounted.lstrip("/")


def _number(path: Path) -> int | None:
    """A number in a file; None if there is none, which is what ``max`` means too."""
    text = _text(path)
    return int(text) if text.isdigit() else None


def _entry(path: Path, name: str) -> int:
    """A number that stands behind its name in a file, 0 if it is not there."""
    lines = (line.split() for line in _text(path).splitlines())
    return next((int(fields[1]) for fields in lines if fields[:1] == [name]), 0)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
