"""Device memory: moving it between the tiers, copying it to be saved, and what contexts take.

As a script, this file is a process that has a context, and keeps it until its input is closed.
"""

from __future__ import annotations

import gc
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from _gpu_device import GIB, Add, Setting, module_of, open_device

SIZES_MB = (100, 500, 2_000, 10_000)
DRY_SIZES_MB = (1, 4)
ON_DISK_MB = 500
"""The largest state that is written to disk, which takes seconds for each GB."""
CONTEXTS = 3


def _sizes(setting: Setting) -> list[int]:
    """Sizes in MB whose states, with gradients and a copy in host memory, fit."""
    import psutil

    if setting.dry:
        return list(DRY_SIZES_MB)
    free, _ = module_of(setting).mem_get_info(setting.device)
    room = min(free / 1.6, psutil.virtual_memory().available / 3)
    return [size for size in SIZES_MB if 1e6 * size <= room]


def measure_switches(setting: Setting, add: Add) -> None:
    """Add a row for each size of state and tier."""
    from _switch_runs import Net
    from _switch_tiers import ResNet50, copy_bandwidth, measure_tier

    makers: dict[str, Any] = {
        f"{size} MB": (size, lambda size=size: Net(int(1e6 * size))) for size in _sizes(setting)
    }
    if not setting.dry:
        makers["ResNet-50"] = (310, ResNet50)
    for name, (size, make) in makers.items():
        repetitions = 2 if setting.dry else 10 if size < 2_000 else 4
        copy: dict[str, float] = {}
        for tier in ("resident", "host", "disk"):
            if tier == "disk" and size > ON_DISK_MB:
                continue
            row = measure_tier(make, tier, setting.folder, repetitions)
            copy = copy or copy_bandwidth(row["state_bytes"], repetitions)
            add(state=name, tier=tier, **_rates(row, copy))
            _forget(setting)


def _rates(row: dict[str, Any], copy: dict[str, float]) -> dict[str, Any]:
    found = {f"{each}_ms": 1e3 * row[f"{each}_seconds"] for each in ("park", "resume")}
    found["first_park_ms"] = 1e3 * row["first_park_seconds"]
    found["first_step_ms"] = 1e3 * row["first_step_seconds"]
    found["step_ms"] = 1e3 * row["step_seconds"]
    if row["moved_bytes"]:
        for each, way in (("park", "out"), ("resume", "in")):
            rate = row["moved_bytes"] / row[f"{each}_seconds"]
            found[f"{each}_GB/s"] = rate / 1e9
            found[f"copy_{way}_GB/s"] = copy[way] / 1e9
            found[f"{each}_share"] = rate / copy[way]
    return found


def _forget(setting: Setting) -> None:
    """Let the next size begin with an empty device."""
    import torch

    from optuna_hermes.suspend._tiers._accelerators import accelerator_of

    gc.collect()
    accelerator = accelerator_of(torch.device(setting.device))
    assert accelerator is not None
    accelerator.free_unused()
    accelerator.free_pinned()


def measure_saving(setting: Setting, add: Add) -> None:
    """Add how long the copies of states take from which a thread writes."""
    import torch
    from _switch_tiers import copy_bandwidth

    from optuna_hermes.suspend._tiers._copies import Copies
    from optuna_hermes.suspend._values._tree import frozen

    for size in _sizes(setting):
        count = 100
        pieces = [
            torch.zeros(int(1e6 * size) // count, dtype=torch.uint8, device=setting.device)
            for _ in range(count)
        ]
        tree = dict(enumerate(pieces))
        copies, seconds, pageable = Copies(), [], []
        for _ in range(4):
            began = time.perf_counter()
            copy = copies.copy(tree)
            seconds.append(time.perf_counter() - began)
            copy.release()
        for _ in range(2):
            began = time.perf_counter()
            frozen(tree)
            pageable.append(time.perf_counter() - began)
        usual = statistics.median(seconds[1:])
        add(
            state=f"{size} MB",
            first_ms=1e3 * seconds[0],
            later_ms=1e3 * usual,
            pageable_ms=1e3 * min(pageable),
            GB_per_second=1e-3 * size / usual,
            pinned_copy_GB_per_second=copy_bandwidth(int(1e6 * size), 2)["out"] / 1e9,
        )
        del tree, pieces, copy
        copies.free()
        _forget(setting)


# -- contexts ----------------------------------------------------------------------------------


def measure_contexts(setting: Setting, add: Add) -> None:
    """Add what one process takes, step by step, and then several of them."""
    from _gpu_driver import used_bytes

    for number in range(1, 1 + CONTEXTS):
        add(processes=number, **_with_contexts(setting, number, used_bytes))


def _with_contexts(setting: Setting, number: int, used_bytes: Any) -> dict[str, Any]:
    before = used_bytes()
    command = [sys.executable, __file__, str(setting.folder), *["--dry-run"] * setting.dry]
    children = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(number)
    ]
    try:
        lines = []
        for child in children:
            assert child.stdout is not None
            lines.append(child.stdout.readline().split())
        after = used_bytes()
    finally:
        for child in children:
            child.communicate()
    made, worked, convolved = (float(part) / GIB for part in lines[0])
    driver = None if before is None or after is None else (after - before) / GIB
    return {
        "of_the_first_context_GiB": made,
        "with_a_product_GiB": worked,
        "with_a_convolution_GiB": convolved,
        "of_all_by_the_driver_GiB": driver,
    }


def be_context(folder: Path, *, dry: bool) -> None:
    """Use the device; print what this takes after each step beside what torch has reserved."""
    from _gpu_driver import used_bytes

    others = used_bytes() or 0
    setting = open_device(folder, dry=dry)
    import torch

    module = module_of(setting)
    taken = []

    def look() -> None:
        module.synchronize(setting.device)
        free, total = module.mem_get_info(setting.device)
        used = total - free - module.memory_reserved(setting.device)
        taken.append(used if dry else used - others)

    matrix = torch.ones(64, 64, device=setting.device)
    look()
    (matrix @ matrix).sum().item()
    look()
    torch.nn.functional.conv2d(matrix[None, None], matrix[None, None, :3, :3]).sum().item()
    look()
    print(*taken, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    be_context(Path(sys.argv[1]), dry="--dry-run" in sys.argv)
