"""Classification of a trial's errors: its own, its device's, or fatal to the whole study."""

from __future__ import annotations

import re

from optuna_hermes.broker._devices._nvml import NvmlDevices
from optuna_hermes.errors import (
    BrokerError,
    DeviceSpecError,
    InvalidInputError,
    MonitorError,
    ObjectiveError,
    StorageError,
    causes_of,
)
from optuna_hermes.workers._words import text_of

_OUT_OF_MEMORY_TYPES = ("OutOfMemoryError", "MemoryError")
_OUT_OF_MEMORY = re.compile(
    r"out of memory"  # CUDA's context and allocators, NCCL, HIP, XLA
    r"|allocate memory"  # the allocator of host memory; ENOMEM
    r"|_ALLOC_FAILED"  # cuBLAS, cuDNN, cuFFT, cuSOLVER, cuSPARSE
    # Raised by the first call of these libraries if their handles do not fit.
    r"|(CUBLAS|CUDNN|CUSOLVER)_STATUS_(NOT_INITIALIZED|INTERNAL_ERROR)",
    re.IGNORECASE,
)

_OF_DEVICE = ("uncorrectable ECC error", "uncorrectable NVLink error", "GPU is lost")


def is_of_device(error: BaseException, devices: str) -> bool:
    """True if a device has failed, not the objective; ``devices`` as in ``CUDA_VISIBLE_DEVICES``.

    CUDA reports much the same for a wrong kernel and for a lost GPU, so the GPU driver is asked.
    """
    text = text_of(error, str)
    if not (devices and isinstance(error, RuntimeError) and "CUDA error" in text):
        return False
    if any(words in text for words in _OF_DEVICE):
        return True
    try:
        source = NvmlDevices(devices.split(","))
    except DeviceSpecError:
        return True  # the driver has gone since this process was given its device
    try:
        return not all(device.healthy and not device.lost for device in source.poll().devices)
    finally:
        source.close()


def is_out_of_memory(error: BaseException) -> bool:
    """True if memory did not suffice; by type name and text, since torch may not be installed.

    Some of these texts have other causes too: they cost a trial one more attempt at most.
    """
    return any(
        any(kind.__name__ in _OUT_OF_MEMORY_TYPES for kind in type(each).__mro__)
        or _OUT_OF_MEMORY.search(text_of(each, str))
        for each in causes_of(error)
    )


def is_misuse(error: BaseException, *, anything_reported: bool) -> bool:
    """True if an error of this package, raised in an objective, fails its trial alone.

    If no trial of the study has reported anything, a metric that is not logged is misspelt in all
    of them, and fails no trial.
    """
    if isinstance(error, MonitorError):
        return anything_reported
    of_surroundings = isinstance(error, (BrokerError, ObjectiveError, StorageError))
    return isinstance(error, InvalidInputError) and not of_surroundings
