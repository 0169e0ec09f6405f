"""Standard output belongs to results."""

from __future__ import annotations

import subprocess
import sys

NOISE = """
import ctypes
from optuna_hermes.cli._output import libraries_to_stderr, show_json
with libraries_to_stderr():
    ctypes.CDLL(None).puts(b"noise")
show_json({"a": 1})
"""


def test_what_a_library_prints_from_c_is_in_no_document() -> None:
    """It goes to standard error, also what would have been written at the end of the process."""
    done = subprocess.run([sys.executable, "-c", NOISE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["{", '"a":', "1", "}"]
    assert done.stderr == "noise\n"
