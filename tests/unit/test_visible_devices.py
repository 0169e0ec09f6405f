"""The GPUs of a host that ``CUDA_VISIBLE_DEVICES`` shows."""

from __future__ import annotations

import pytest

from optuna_hermes.broker._devices._visible import Gpu, visible

GPUS = (
    Gpu(uuid="GPU-1111-aa"),
    Gpu(uuid="GPU-1111-bb", slices=("MIG-5555-1", "MIG-5555-2")),
    Gpu(uuid=""),
    Gpu(uuid="GPU-2222-cc"),
)
SLICES = ["MIG-5555-1", "MIG-5555-2"]
ALL = ["GPU-1111-aa", *SLICES, "GPU-2222-cc"]


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        (None, ALL),
        ("0,1,2,3", ALL),
        (" 3 , 0 ", ["GPU-2222-cc", "GPU-1111-aa"]),
        ("1", SLICES),
        ("GPU-1111-bb", SLICES),
        ("GPU-2", ["GPU-2222-cc"]),
        ("MIG-5555-2", ["MIG-5555-2"]),
        ("0,0,3", ["GPU-1111-aa", "GPU-2222-cc"]),
        ("2,3", ["GPU-2222-cc"]),
        ("3,GPU-1111", ["GPU-2222-cc"]),
        ("3,x,0", ["GPU-2222-cc"]),
        ("3,4,0", ["GPU-2222-cc"]),
        ("", []),
        (" ", []),
        ("-1", []),
        ("GPU-", []),
        ("GPU-9", []),
        ("MIG-5555", []),
        ("\N{SUPERSCRIPT TWO}", []),
        ("9" * 5000, []),
    ],
)
def test_what_cuda_may_see(named: str | None, expected: list[str]) -> None:
    """Indices, UUIDs and their beginnings count up to the first part that names nothing."""
    assert visible(GPUS, named) == expected
