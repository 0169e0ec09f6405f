"""A function over independent jobs, in parallel processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from threadpoolctl import threadpool_limits

from optuna_hermes._cgroups import usable_cpus
from optuna_hermes._parent import end_with_parent
from optuna_hermes.errors import HermesError

Job = TypeVar("Job")
Answer = TypeVar("Answer")

# A global, set at the fork: a function passed to ``submit`` would have to be picklable.
_function: Callable[[Any], Any]


def parallel_map(
    function: Callable[[Job], Answer],
    jobs: Sequence[Job],
    *,
    processes: int | None = None,
    on_answer: Callable[[], None] = lambda: None,
) -> list[Answer]:
    """Apply a function to each job, in parallel, and return the answers in the order of the jobs.

    The function need not be picklable; jobs and answers must be. ``processes`` None is one for each
    core, and ``on_answer`` is called in this process.

    Raises:
        HermesError: a process was killed.
    """
    n_processes = min(len(jobs), processes or usable_cpus())
    if n_processes <= 1:
        answers = []
        for job in jobs:
            answers.append(function(job))
            on_answer()
        return answers
    # Forked: the children have the loaded curve sets and a user's policy without pickling.
    context = multiprocessing.get_context("fork")
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        n_processes, context, initializer=_begin, initargs=(function, os.getpid())
    )
    try:
        # Processes start here, and inherit the mask: Ctrl-C is for this one only.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            futures = [pool.submit(_do, job) for job in jobs]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for future in as_completed(futures):
            future.result()
            on_answer()
        return [future.result() for future in futures]
    except BrokenProcessPool as error:
        raise HermesError(
            f"One of {n_processes} processes that compute was killed, perhaps for want of memory: "
            "give them more, or less to do, and run the same again."
        ) from error
    except BaseException:
        # A job may take minutes, and its answer is not needed any more.
        for process in set(multiprocessing.active_children()) - others:
            process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(function: Callable[[Any], Any], parent: int) -> None:
    global _function
    # Else it would wait for ever for a parent that was killed, with all curve sets in its memory.
    end_with_parent()
    if os.getppid() != parent:  # it has ended before that
        os._exit(1)
    _function = function
    # There is a process for each core: threads of linear algebra would wait for each other. Those
    # of libraries that are loaded later read the variable.
    threadpool_limits(1)
    os.environ["OMP_NUM_THREADS"] = "1"


def _do(job: Any) -> Any:
    return _function(job)
