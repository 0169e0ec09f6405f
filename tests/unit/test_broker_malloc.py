"""The memory of a broker after a peak."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PEAK = """
import psutil
from optuna_hermes.broker._server._malloc import give_back_large_blocks
{call}
bytes(bytearray(16_000_000))  # after which glibc would keep what is smaller
large, small = [], []
for _ in range(64):
    large.append(bytearray(b"x") * 1_000_000)
    small.append(bytearray(60_000))  # behind each, so that no heap ends with what is free
del large
print(psutil.Process().memory_info().rss)
"""


HOLES = """
import psutil
from optuna_hermes.broker._server._malloc import give_back_free_pages
blocks = [bytearray(b"x") * 20_000 for _ in range(3_000)]
blocks = blocks[::10]
{call}
print(psutil.Process().memory_info().rss)
"""

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="other C libraries are left alone"
)


def left_bytes(call: str, code: str = PEAK) -> int:
    code = code.format(call=call)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    return int(done.stdout)


def test_what_a_peak_took_is_given_back() -> None:
    """Without the call 64 MB stay with the process, with it nearly nothing does."""
    assert left_bytes("") - left_bytes("give_back_large_blocks()") > 40e6


def test_holes_in_the_heap_are_given_back() -> None:
    """Of 60 MB of which a tenth is in use, spread all over, most goes."""
    assert left_bytes("", HOLES) - left_bytes("give_back_free_pages()", HOLES) > 30e6
