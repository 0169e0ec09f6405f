"""Objectives that end in ways of their own."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path

import optuna
import torch
from torch.utils.data import DataLoader, TensorDataset

from optuna_hermes.pytorch import suspendable


def _units(trial: optuna.Trial, count: int = 3) -> float:
    for unit in range(1, count + 1):
        trial.report(1 / unit, unit)
        if trial.should_prune():
            raise optuna.TrialPruned
    return 1 / count


def _crash(how: str) -> None:
    if how == "_exit":
        os._exit(7)
    elif how == "alarm":
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        threading.Event().wait()
    elif how == "segfault":
        ctypes.string_at(0)
    elif how == "exit":
        sys.exit("enough")
    elif how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "abort":
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.abort()


WAYS = ("_exit", "alarm", "segfault", "exit", "kill", "abort")


def crashing(trial: optuna.Trial) -> float:
    """All but the last end their own processes, each in another way."""
    if trial.number < len(WAYS):
        print(f"trial {trial.number} ends by {WAYS[trial.number]}", flush=True)
        _crash(WAYS[trial.number])
    return _units(trial)


def crashing_late(trial: optuna.Trial) -> float:
    """Trial 0 ends its process in its third unit, always."""
    for unit in range(1, 4):
        if trial.number == 0 and unit == 3:
            os._exit(9)
        trial.report(1 / unit, unit)
        trial.should_prune()
    return 1.0


def beginning_anew(trial: optuna.Trial) -> float:
    """The first process ends in its third unit; the next one reports other values."""
    mark = Path("begun")
    best = 2.0 if mark.exists() else 1.0
    mark.touch()
    for unit in range(1, 5):
        if unit == 3 and best == 1.0:
            os._exit(9)
        trial.report(best / unit, unit)
        trial.should_prune()
    return best


def beginning_anew_in_a_loop(trial: optuna.Trial) -> float:
    """As ``beginning_anew``, in a loop that waits in memory only."""
    mark = Path("begun")
    best = 2.0 if mark.exists() else 1.0
    mark.touch()
    run = suspendable(trial)
    for epoch in run.epochs(4):
        if epoch == 2 and best == 1.0:
            os._exit(9)
        for _ in run.batches(iter([1, 2])):
            pass
        run.report(best / (epoch + 1))
    return best


def crashing_rarely(trial: optuna.Trial) -> float:
    """Each unit is lost once, and reached the next time."""
    loader = DataLoader(TensorDataset(torch.arange(4.0)))
    run = suspendable(trial)
    for epoch in run.epochs(5):
        mark = Path(f"crashed-{epoch}")
        if not mark.exists() and epoch:
            mark.touch()
            os._exit(1)
        for _ in run.batches(loader):
            pass
        run.report(1 / (1 + epoch))
    return 1.0


def misusing(trial: optuna.Trial) -> float:
    """Trial 0 names its objects twice, trial 1 reports too early, the others are well."""
    loader = DataLoader(TensorDataset(torch.arange(4.0)))
    run = suspendable(trial)
    if trial.number == 0:
        suspendable(trial)
    if trial.number == 1:
        run.report(1.0)
    for _ in run.epochs(2):
        for _ in run.batches(loader):
            pass
        run.report(1.0)
    return 1.0


def failing(trial: optuna.Trial) -> float:
    raise ValueError(f"no such column in trial {trial.number}")


def failing_at_first(trial: optuna.Trial) -> float:
    """The first twelve trials are in a region where nothing works, the others train on."""
    if 0 < trial.number <= 12:
        time.sleep(0.05)
        raise ValueError("bad region")
    return _units(trial, 40 if trial.number == 0 else 3)


class Slow(TensorDataset):
    """Each sample takes a second of CPU time, in whatever process it is made."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        end = time.process_time() + 1.0
        while time.process_time() < end:
            pass
        return super().__getitem__(index)


def silent(trial: optuna.Trial) -> float:
    """Each validates for eight seconds without a word; loader workers do all the work."""
    data = TensorDataset(torch.arange(64.0))
    run = suspendable(trial)
    for _ in run.epochs(1):
        for _ in run.batches(DataLoader(data)):
            time.sleep(0.02)
        for _ in DataLoader(Slow(torch.arange(8.0)), batch_size=8, num_workers=1):
            pass
        run.report(1.0)
    return 1.0


def deadlocked(trial: optuna.Trial) -> float:
    """Trial 0 waits for what never comes, trial 1 has stopped itself, the others train."""
    if trial.number == 0:
        threading.Event().wait()
    if trial.number == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return _units(trial)
