"""Entry point of a worker that is not forked but started afresh: it imports the objective anew."""

from __future__ import annotations

import gc
import os
import pickle
import sys
from typing import Any

from optuna_hermes.errors import HermesError
from optuna_hermes.workers._fork_safety import Unsafe
from optuna_hermes.workers._fork_server import prepare_imports
from optuna_hermes.workers._objective import Objective, unpack
from optuna_hermes.workers._processes import NOT_LOADED, end_with
from optuna_hermes.workers._signals import leave_to_driver
from optuna_hermes.workers._start_method import fork_by_default
from optuna_hermes.workers._worker import serve


def main() -> int:
    """Read the fork server's order, load the objective, and work."""
    gc.enable()
    order, words_end, server = map(int, sys.argv[1:])
    os.set_inheritable(words_end, False)  # not for programs that the objective starts
    end_with(server)
    os.setsid()  # see kill_session
    leave_to_driver()
    # A duplicated handle shares its position, and other workers read the same file.
    with open(f"/proc/self/fd/{order}", "rb") as file:
        packed, path, arguments, job, unsafe = pickle.loads(file.read())
    os.close(order)
    prepare_imports(packed, path, arguments)
    fork_by_default()
    try:
        # CUDA fixes its devices when it is first used: load the objective once they are leased.
        load = _unpack_late if unsafe is Unsafe.ACCELERATOR else unpack
        objective = load(packed, job.spec.name)
    except HermesError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return NOT_LOADED
    serve(job, objective, words_end, None, shares=False)


def _unpack_late(packed: bytes | str, study_name: str) -> Objective:
    def objective(trial: Any) -> Any:
        return unpack(packed, study_name)(trial)

    return objective
