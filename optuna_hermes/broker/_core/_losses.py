"""Runs that lose their process again and again without a new unit: they are given up. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from optuna_hermes.broker._core import _event_log
from optuna_hermes.broker._core._book import Book, Client
from optuna_hermes.broker._core._events import Command
from optuna_hermes.broker._core._rows import save
from optuna_hermes.broker._core._run import MOST_LOSSES, LiveTrial
from optuna_hermes.broker._core._study import Study
from optuna_hermes.broker._protocol import Ended, GiveUp

TOGETHER_SECONDS = 5.0
"""Processes that end so shortly before their driver have ended with it."""


def count(book: Book, run: LiveTrial, client: Client, now: float) -> None:
    """Count the loss of a worker that was training this run, or waiting with it.

    It does not count where its device has failed, or its driver is gone. A plain
    trial's process is its user's: no other one is started.
    """
    study = book.studies[run.study]
    failed = (slot for id_, slot in book.slots.items() if id_ in run.devices)
    if client.role != "worker" or study.driver is None:
        return
    if all(slot.device.healthy for slot in failed):
        run.losses += 1
        run.lost_at, run.lost_pid, run.hung = now, client.pid, client.hung


def forget(book: Book, study: Study, now: float, out: list[Command]) -> None:
    """Take back recent losses: a driver that ends may have ended its workers too."""
    for run in study.runs.values():
        if run.live and run.lost_at is not None and now - run.lost_at <= TOGETHER_SECONDS:
            run.losses, run.lost_at = run.losses - 1, None
            save(book, run, now, out)


def shown(study: Study) -> Iterator[dict[str, Any]]:
    """Runs that have lost processes in the driver's time, as the status shows them to it."""
    for run in study.runs.values():
        if run.live and run.losses:
            yield {
                "trial": run.number,
                "trial_id": run.trial_id,
                "losses": run.losses,
                "most_losses": MOST_LOSSES,
                "pid": run.lost_pid,
                "hung": run.hung,
                "given_up": run.given_up and run.connection is None,
            }


def give_up(book: Book, message: GiveUp, now: float, out: list[Command]) -> LiveTrial | None:
    """Close a run that is given up, as its driver has told Optuna.

    Returns:
        The run, None if it was not given up, or is over.
    """
    study = book.studies.get(message.study)
    run = None if study is None else study.runs.get(message.number)
    if study is None or run is None or not run.live or run.connection is not None:
        return None
    if not run.given_up or study.is_elsewhere(run):
        return None
    run.state, run.tier = message.state, None
    save(book, run, now, out)
    ended = Ended(epoch=run.epoch, state=message.state, error=message.reason)
    out.append(_event_log.ended(book, run, ended, now))
    return run
