"""Classification of errors that an objective raises."""

from __future__ import annotations

import errno

import pytest

from optuna_hermes.errors import (
    BrokerError,
    CheckpointError,
    DatabaseOutageError,
    HermesError,
    InvalidInputError,
    MonitorError,
    StorageError,
    UnstorableError,
)
from optuna_hermes.workers._fault import is_misuse, is_out_of_memory


class OutOfMemoryError(RuntimeError):
    """As torch names its own."""


@pytest.mark.parametrize(
    "error",
    [
        OutOfMemoryError("Tried to allocate 2.00 GiB"),
        MemoryError("17 GiB"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously"),
        RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"),
        RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"),
        RuntimeError("NCCL error: unhandled cuda error\nCuda failure 2 'out of memory'"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
    ids=str,
)
def test_libraries_say_in_many_ways_that_memory_is_out(error: Exception) -> None:
    """The trial is put back for each, as for torch's own error."""
    assert is_out_of_memory(error)


def test_an_error_that_was_raised_for_want_of_memory_is_one() -> None:
    """Frameworks raise errors of their own from it."""
    error = RuntimeError("the step failed")
    error.__cause__ = MemoryError()
    assert is_out_of_memory(error)


def test_errors_that_are_their_own_causes_are_gone_through_once() -> None:
    """``raise error from error`` is legal."""
    error, other = ValueError("lr"), KeyError("lr")
    error.__cause__, other.__cause__ = other, error
    assert not is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("out of luck"),
        ValueError("mat1 and mat2 shapes cannot be multiplied"),
    ],
    ids=str,
)
def test_other_errors_are_not_of_memory(error: Exception) -> None:
    """They are the trial's own."""
    assert not is_out_of_memory(error)


@pytest.mark.parametrize(
    ("error", "its_own"),
    [
        (InvalidInputError("two callbacks"), True),
        (StorageError("no such study"), False),
        (DatabaseOutageError("the database is away"), False),
        (BrokerError("no broker"), False),
        (CheckpointError("it cannot be read"), False),
        (UnstorableError("it cannot be written"), True),
        (HermesError("something else"), False),
    ],
    ids=str,
)
def test_misuse_is_a_trial_s_own_fault(error: HermesError, its_own: bool) -> None:
    """A fault of a trial's surroundings is not its own."""
    assert is_misuse(error, anything_reported=False) == its_own


def test_a_metric_that_no_trial_has_logged_is_misspelt_in_all() -> None:
    """The study ends at once and no trial has failed, unless another trial has logged it."""
    assert not is_misuse(MonitorError("x"), anything_reported=False)
    assert is_misuse(MonitorError("x"), anything_reported=True)
