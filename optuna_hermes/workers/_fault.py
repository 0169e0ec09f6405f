"""Whether an error of a trial is the trial's own, or that of a device that broke under it."""

from __future__ import annotations

from optuna_hermes.broker._devices._nvml import NvmlDevices
from optuna_hermes.errors import DeviceSpecError

_OF_DEVICE = ("uncorrectable ECC error", "uncorrectable NVLink error", "GPU is lost")


def is_of_device(error: Exception, devices: str) -> bool:
    """Whether the device has failed and not the objective.

    CUDA says much the same when a kernel is wrong and when a GPU is gone, so the driver is asked.

    Args:
        error: what the objective raised.
        devices: the GPUs it was given, as in ``CUDA_VISIBLE_DEVICES``.
    """
    if not (devices and isinstance(error, RuntimeError) and "CUDA error" in str(error)):
        return False
    if any(words in str(error) for words in _OF_DEVICE):
        return True
    try:
        source = NvmlDevices(devices.split(","))
    except DeviceSpecError:
        return True  # the driver has gone since this process was given its device
    try:
        return not all(device.healthy and not device.lost for device in source.poll())
    finally:
        source.close()
