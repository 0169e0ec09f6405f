"""Readings of the devices from NVIDIA's driver, and the cost of hooks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from _gpu_device import GIB, Add, Setting

LOAD_SECONDS = 5.0


def used_bytes() -> int | None:
    """Bytes of the first device that are in use, None if the driver cannot be asked."""
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            handle = next(_handles(pynvml))
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
            return int(memory.used)
        finally:
            pynvml.nvmlShutdown()
    except (pynvml.NVMLError, StopIteration):
        return None


def read_counters(setting: Setting, add: Add) -> None:
    """Add each counter of each device, energy beside power, and the cost of a poll."""
    import pynvml

    pynvml.nvmlInit()
    add(counter="driver", value=_answer(pynvml.nvmlSystemGetDriverVersion))
    for number, handle in enumerate(_handles(pynvml)):
        for name, value in _counters(pynvml, handle).items():
            add(device=number, counter=name, value=value)
        _compare_energy(pynvml, handle, number, setting, add)
    pynvml.nvmlShutdown()
    _time_polls(add)


def _handles(pynvml: Any) -> Iterator[Any]:
    for index in range(pynvml.nvmlDeviceGetCount()):
        yield pynvml.nvmlDeviceGetHandleByIndex(index)


def _answer(call: Callable[..., Any], *args: Any) -> Any:
    """Return the driver's answer, or the name of its error."""
    import pynvml

    try:
        found = call(*args)
    except (pynvml.NVMLError, AttributeError) as error:
        return str(error)
    return found.decode() if isinstance(found, bytes) else found


def _counters(pynvml: Any, handle: Any) -> dict[str, Any]:
    memory = _answer(pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2)
    processes = _answer(pynvml.nvmlDeviceGetComputeRunningProcesses, handle)
    utilization = _answer(pynvml.nvmlDeviceGetUtilizationRates, handle)
    found = {
        "UUID": _answer(pynvml.nvmlDeviceGetUUID, handle),
        "memory total, GiB": getattr(memory, "total", 0) / GIB or memory,
        "memory used, GiB": getattr(memory, "used", 0) / GIB if hasattr(memory, "used") else memory,
        "compute processes": len(processes) if isinstance(processes, list) else processes,
        "utilization, %": getattr(utilization, "gpu", utilization),
    }
    for name, call in {
        "power, mW": "nvmlDeviceGetPowerUsage",
        "power limit, mW": "nvmlDeviceGetEnforcedPowerLimit",
        "energy, mJ": "nvmlDeviceGetTotalEnergyConsumption",
        "compute mode": "nvmlDeviceGetComputeMode",
        "MIG mode": "nvmlDeviceGetMigMode",
        "PCIe generation": "nvmlDeviceGetCurrPcieLinkGeneration",
        "PCIe width": "nvmlDeviceGetCurrPcieLinkWidth",
    }.items():
        found[name] = _answer(getattr(pynvml, call), handle)
    return {name: str(each) if isinstance(each, list) else each for name, each in found.items()}


def _compare_energy(pynvml: Any, handle: Any, number: int, setting: Setting, add: Add) -> None:
    """Add the energy that is counted under load, beside the integral of the power."""
    import torch

    matrix = torch.ones(64 if setting.dry else 8192, 64 if setting.dry else 8192)
    matrix = matrix.to(setting.device)
    before = _answer(pynvml.nvmlDeviceGetTotalEnergyConsumption, handle)
    began, watts = time.monotonic(), []
    while (took := time.monotonic() - began) < (0.2 if setting.dry else LOAD_SECONDS):
        (matrix @ matrix).sum().item()
        watts.append(_answer(pynvml.nvmlDeviceGetPowerUsage, handle))
    after = _answer(pynvml.nvmlDeviceGetTotalEnergyConsumption, handle)
    counted = (after - before) / 1e3 if isinstance(after, int) else after
    powers = [each / 1e3 for each in watts if isinstance(each, int)]
    integral = took * sum(powers) / len(powers) if powers else None
    add(device=number, counter="energy under load, J", value=counted)
    add(device=number, counter="power under load times its duration, J", value=integral)


def _time_polls(add: Add) -> None:
    from optuna_hermes.broker._devices._source import Devices, parse_devices

    source = Devices(parse_devices("auto"), host="here", named=False)
    try:
        times = []
        for _ in range(20):
            began = time.perf_counter()
            devices = source.poll(()).devices
            times.append(time.perf_counter() - began)
        add(counter="poll of the broker, ms", value=1e3 * sorted(times)[len(times) // 2])
        for number, device in enumerate(devices):
            state = f"{'healthy' if device.healthy else 'not healthy'}, "
            state += "free" if device.free else f"not free: {device.problem}"
            add(device=number, counter="as the broker sees it", value=state)
    finally:
        source.close()


# -- slices ------------------------------------------------------------------------------------


def look_for_slices(setting: Setting, add: Add) -> None:
    """Add a row for each device, and for each of its slices what a process sees of it."""
    import pynvml

    pynvml.nvmlInit()
    for number, handle in enumerate(_handles(pynvml)):
        mode = _answer(pynvml.nvmlDeviceGetMigMode, handle)
        cut = isinstance(mode, list | tuple) and mode[0] == 1
        add(device=number, cut_into_slices=cut, mode=str(mode))
        for uuid in _slices(pynvml, handle) if cut else ():
            add(device=number, slice=uuid, **_seen_in(uuid))
    pynvml.nvmlShutdown()


def _slices(pynvml: Any, handle: Any) -> Iterator[str]:
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            each = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except pynvml.NVMLError:  # there are fewer
            continue
        uuid = pynvml.nvmlDeviceGetUUID(each)
        yield uuid.decode() if isinstance(uuid, bytes) else uuid


def _seen_in(uuid: str) -> dict[str, Any]:
    """Return the devices and memory that a process with a slice sees."""
    script = (
        "import json, torch; torch.ones(1, device='cuda')\n"
        "print(json.dumps({'devices': torch.cuda.device_count(), "
        "'memory_GiB': torch.cuda.mem_get_info()[1] / 2**30}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": uuid},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1]}
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen


# -- hooks -------------------------------------------------------------------------------------


def measure_hooks(setting: Setting, add: Add) -> None:
    """Add the figures of ``hook_cost.py``."""
    script = str(Path(__file__).with_name("hook_cost.py"))
    short = ["--rounds", "3", "--calls", "100"] if setting.dry else []
    done = subprocess.run(
        [sys.executable, script, "--json", *short], capture_output=True, text=True, check=False
    )
    if not done.stdout:
        raise SystemExit(done.stderr.strip().splitlines()[-1])
    for name, value in json.loads(done.stdout).items():
        add(figure=name, value=value)
