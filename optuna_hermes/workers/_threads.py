"""Number of threads that libraries compute with, for those that a process has loaded already.

They read it from the environment as they are loaded, and not again.
"""

from __future__ import annotations

import os
import sys

from threadpoolctl import ThreadpoolController

THREADS_VARIABLE = "OMP_NUM_THREADS"

_OWN_VARIABLES = {
    "openblas": ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS"),
    "mkl": ("MKL_NUM_THREADS",),
    "blis": ("BLIS_NUM_THREADS",),
    "openmp": ("MKL_NUM_THREADS",),  # torch takes MKL's number for OpenMP
}
"""Variables by which a user tells a library, in place of ``OMP_NUM_THREADS``."""


def limit_threads(most: int) -> None:
    """Have the libraries of this process compute with at most so many threads, as new ones would.

    A library keeps a number that the user has given it, and one that is smaller.
    """
    torch = sys.modules.get("torch")
    if torch is not None and not _is_told("mkl") and torch.get_num_threads() > most:
        torch.set_num_threads(most)  # OpenMP's, and of the MKL that is a part of torch
    for library in ThreadpoolController().lib_controllers:
        if not _is_told(library.internal_api) and library.num_threads > most:
            library.set_num_threads(most)


def _is_told(library: str) -> bool:
    return any(name in os.environ for name in _OWN_VARIABLES.get(library, ()))
