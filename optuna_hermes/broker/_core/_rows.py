"""Rows of runs in the ledger, with their owner where several hosts share a study. Pure."""

from __future__ import annotations

from dataclasses import replace

from optuna_hermes.broker._core._book import Book
from optuna_hermes.broker._core._events import Claim, Command
from optuna_hermes.broker._core._run import LiveTrial
from optuna_hermes.ledger._base import RunRecord


def save(book: Book, run: LiveTrial, now: float, out: list[Command]) -> None:
    """Write a run as it is now, unless it is another host's.

    A run that is in no process's memory has no owner: any host may carry it on.
    """
    study = book.studies[run.study]
    if study.is_elsewhere(run):
        return
    claim(book, run, out)
    if study.broker is not None:
        run.owner = study.broker if run.held else None
    run.row = replace(book.record(run, now), owner=run.owner)
    out.append(run.row)


def claim(book: Book, run: LiveTrial, out: list[Command]) -> RunRecord | None:
    """Claim a run for this broker before it is written, if it has no owner.

    Returns:
        Its row if it had to be claimed.
    """
    study = book.studies[run.study]
    if study.broker is None or study.owns(run) or run.row is None:
        return None
    out.append(Claim(study=run.study, number=run.number, slices=run.row.slices))
    run.owner = study.broker
    return run.row


def give_back(book: Book, run: LiveTrial, now: float, out: list[Command]) -> None:
    """Free an earlier broker's run of this host if no process has it any more."""
    if book.studies[run.study].owns(run) and run.live and not run.held:
        save(book, run, now, out)
