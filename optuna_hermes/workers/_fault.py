"""Sorts the errors of a trial: its own, its device's, or those that end the whole study."""

from __future__ import annotations

import re
from collections.abc import Iterator

from optuna_hermes.broker._devices._nvml import NvmlDevices
from optuna_hermes.errors import (
    BrokerError,
    DeviceSpecError,
    InvalidInputError,
    MonitorError,
    ObjectiveError,
    StorageError,
)

_OUT_OF_MEMORY_TYPES = ("OutOfMemoryError", "MemoryError")
_OUT_OF_MEMORY = re.compile(
    r"out of memory"  # CUDA's context and allocators, NCCL, HIP, XLA
    r"|allocate memory"  # the allocator of host memory; ENOMEM
    r"|_ALLOC_FAILED"  # cuBLAS, cuDNN, cuFFT, cuSOLVER, cuSPARSE
    # What the first call of these libraries says if there is no room for their handles.
    r"|(CUBLAS|CUDNN|CUSOLVER)_STATUS_(NOT_INITIALIZED|INTERNAL_ERROR)",
    re.IGNORECASE,
)

_OF_DEVICE = ("uncorrectable ECC error", "uncorrectable NVLink error", "GPU is lost")


def is_of_device(error: BaseException, devices: str) -> bool:
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


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory did not suffice; known by name and words, for torch may not be there.

    Some of the words have other reasons too: a trial is tried once more for them, no oftener.
    """
    return any(
        any(kind.__name__ in _OUT_OF_MEMORY_TYPES for kind in type(each).__mro__)
        or _OUT_OF_MEMORY.search(str(each))
        for each in _with_causes(error)
    )


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    each: BaseException | None = error
    while each is not None:
        yield each
        each = each.__cause__


def is_misuse(error: BaseException, *, anything_reported: bool) -> bool:
    """Whether an error of this package, raised in an objective, is that of its trial alone.

    Args:
        error: what the objective raised.
        anything_reported: whether any trial of the study has reported a value. Where none has, a
            metric that is not logged is misspelt in all of them, and costs no trial.
    """
    if isinstance(error, MonitorError):
        return anything_reported
    of_surroundings = isinstance(error, (BrokerError, ObjectiveError, StorageError))
    return isinstance(error, InvalidInputError) and not of_surroundings
