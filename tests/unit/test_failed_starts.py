"""Workers that end before they have found their trial."""

from __future__ import annotations

import json
import os

import pytest

from optuna_hermes.workers._starts import Starts
from optuna_hermes.workers._words import (
    BEGAN,
    FAILED,
    GRANTED,
    LEFT,
    LONGEST_REASON,
    STOP,
    WAITS,
    sayer,
)


def worker(starts: Starts, pid: int, *words: str, reason: str = "") -> None:
    """A worker is forked, says these words, and ends."""
    starts.forked(pid)
    for word in words:
        starts.said(pid, word, reason)
    starts.exited(pid, "exit status 1", alive=0)


@pytest.mark.parametrize("words", [(), (WAITS, GRANTED), (WAITS, FAILED), (FAILED,)])
def test_who_ends_before_its_trial_is_counted(words: tuple[str, ...]) -> None:
    """As it starts, as it opens a trial, or with an error: again and again."""
    starts = Starts()
    for pid in range(3):
        worker(starts, pid, *words)
    assert starts.failed_in_a_row == 3
    assert starts.reason == "exit status 1"


@pytest.mark.parametrize(
    "words",
    [(WAITS,), (WAITS, LEFT), (WAITS, GRANTED, BEGAN), (WAITS, GRANTED, BEGAN, STOP)],
)
def test_who_only_waited_or_has_begun_is_not_counted(words: tuple[str, ...]) -> None:
    """An idle worker was ended by somebody, and a trial counts its own losses."""
    starts = Starts()
    worker(starts, 1, *words)
    assert starts.failed_in_a_row == 0


def test_an_error_of_a_trial_that_has_begun_is_the_trial_s() -> None:
    """Whatever its worker says after that."""
    starts = Starts()
    worker(starts, 1, WAITS, GRANTED, BEGAN, FAILED, reason="KeyError()")
    assert starts.failed_in_a_row == 0


def test_workers_that_were_alive_together_count_once() -> None:
    """They share what was wrong; the error's own words are the reason."""
    starts = Starts()
    for pid in range(8):
        starts.forked(pid)
    for pid in range(8):
        starts.said(pid, FAILED, "ValueError('x')")
        starts.exited(pid, "exit status 1", alive=7 - pid)
    assert starts.failed_in_a_row == 1
    assert starts.reason == "ValueError('x')"


def test_a_worker_without_room_for_its_threads_is_one_that_was_refused() -> None:
    """Others may leave it theirs; alone it is counted, and the limit is named, not the sampler."""
    starts = Starts()
    reason = """RuntimeError("can't start new thread")"""
    starts.forked(1)
    starts.said(1, FAILED, reason)
    assert starts.exited(1, "exit status 1", alive=3) == reason
    assert starts.check(0.0, print) is None
    assert (starts.failed_in_a_row, starts.room(16, 1, 0.0)) == (0, 2)
    for pid in range(3):
        worker(starts, pid, FAILED, reason=reason)
    assert starts.check(9.0, print) == (
        f"3 workers in a row have ended before their trials began, the last by {reason}: raise the "
        "limit of processes or of memory, then run the same command again."
    )


def test_a_trial_that_begins_is_a_new_beginning() -> None:
    """Failures before it do not count any more."""
    starts = Starts()
    worker(starts, 1)
    worker(starts, 2)
    worker(starts, 3, WAITS, GRANTED, BEGAN)
    worker(starts, 4)
    assert starts.failed_in_a_row == 1


def test_words_go_through_a_pipe_at_once() -> None:
    """A long reason is cut, so that lines of several workers are never mixed."""
    source, end = os.pipe()
    sayer(end)(FAILED, "\u00e9" * 10_000)
    os.close(end)
    sayer(end)(LEFT)  # an objective has closed it
    with open(source, "rb") as file:
        (line,) = file.read().splitlines()
    assert len(line) < 4096
    assert json.loads(line) == {
        "worker": os.getpid(),
        "said": FAILED,
        "reason": "\u00e9" * LONGEST_REASON,
    }
