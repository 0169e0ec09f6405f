"""One contest of ``race.py``, in a process that all its processes are children of.

    python _race_contest.py CONTEST COMMAND...

It starts the command, lets it have its seconds, reads what processor time all its descendants have
used by then, those that have ended too, and kills what is left. It writes ``ended.json``, and ends
by itself, its descendants before it, when it is terminated or the process that started it ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from _race_tasks import Contest

ENDED = "ended.json"
OUTPUT = "output.log"
LOOK_SECONDS = 0.1
CLOSE_SECONDS = 5.0
"""For a contestant to end by itself, out of the race: its database then has all that it did."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main() -> None:
    contest, command = Contest(**json.loads(sys.argv[1])), sys.argv[2:]
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        ended = _run(contest, command)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _kill_all()
    (Path(contest.folder) / ENDED).write_text(json.dumps(ended))


def _run(contest: Contest, command: Sequence[str]) -> dict[str, Any]:
    contest = replace(contest, begun=time.time())
    environment = {**os.environ, **contest.environment(), "OMP_NUM_THREADS": "1"}
    # Else this package, which no installer has compiled in a clone, is compiled at each start.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment["OPTUNA_HERMES_RUNTIME_DIR"] = str(Path(contest.folder, "run"))
    with Path(contest.folder, OUTPUT).open("wb") as output:
        process = subprocess.Popen(
            command, cwd=contest.folder, env=environment, stdin=subprocess.DEVNULL,
            stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    status = _wait(process.pid, contest.ends)
    seconds, cpu_seconds = time.time() - contest.begun, _cpu_seconds()
    if status is None:
        _wait(process.pid, time.time() + CLOSE_SECONDS)
    return {
        "begun": contest.begun,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "status": status,
    }


def _wait(pid: int, until: float) -> int | None:
    """Reap whoever ends; the status of one process if it ends in time."""
    while time.time() < until:
        status = _reap(pid)
        if status is not None:
            return status
        time.sleep(min(LOOK_SECONDS, max(0.0, until - time.time())))
    return None


def _reap(pid: int) -> int | None:
    try:
        while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            if ended[0] == pid:
                return os.waitstatus_to_exitcode(ended[1])
    except ChildProcessError:
        pass  # there is none left
    return None


def _cpu_seconds() -> float:
    """Of all descendants: those that are there, what they have reaped, and what was reaped here."""
    reaped = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = reaped.ru_utime + reaped.ru_stime
    for each in psutil.Process().children(recursive=True):
        try:
            total += sum(each.cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue
    return total


def _kill_all() -> None:
    while descendants := psutil.Process().children(recursive=True):
        for each in descendants:
            try:
                each.kill()
            except psutil.NoSuchProcess:
                continue
        _reap(0)
        time.sleep(0.01)


if __name__ == "__main__":
    main()
