"""Checks of the GPUs and their driver."""

from __future__ import annotations

from collections.abc import Iterator

from optuna_hermes.cli._checks._base import Check, State, judged
from optuna_hermes.cli._checks._software import version
from optuna_hermes.view import size


def nvidia_driver() -> Iterator[Check]:
    """Check the NVIDIA driver and the GPUs that ``auto`` leaves out, mostly without a message."""
    from optuna_hermes.broker._devices import _nvml as nvml

    try:
        with nvml.driver() as binding:
            troubles = dict(nvml.troubles(binding))
    except nvml.NoDriverError as error:
        if error.installed:
            yield Check(name="NVIDIA driver", state="warn", found="does not work", hint=str(error))
        return
    for index, words in troubles.items():
        hint = f"See `nvidia-smi -i {index}`; reset it, or restart the host."
        yield Check(name=f"GPU {index}", state="warn", found=words, hint=hint)


def devices() -> Iterator[Check]:
    """Check the devices that a broker takes by ``auto``."""
    from optuna_hermes.broker._devices._source import Devices, parse_devices

    source = Devices(parse_devices("auto"), named=False)
    try:
        polled = source.poll()
    finally:
        source.close()
    for device in polled:
        memory = "" if device.memory_bytes is None else f", {size(device.memory_bytes)}"
        state: State = "fail" if not device.healthy else "warn" if device.problem else "ok"
        yield Check(
            name=f"device {device.id}",
            state=state,
            found=("healthy" if device.healthy else "not healthy") + memory,
            hint=device.problem,
        )
    torch = version("torch") or ""
    if torch.endswith("+cpu") and any(device.kind == "gpu" for device in polled):
        problem = "Install a build of torch with CUDA, or say --devices cpu:2."
        yield judged("torch and GPUs", f"torch {torch}", problem=problem)
