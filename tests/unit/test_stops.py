"""Reasons to suspend a whole study: signals, the call's time, the end of its job."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from contextlib import nullcontext
from time import gmtime, strftime

import pytest

from optuna_hermes._job_environment import JobEnvironment
from optuna_hermes.errors import InvalidInputError
from optuna_hermes.workers import _stops
from optuna_hermes.workers._stops import Stops, suspending_seconds

JOB = JobEnvironment(job="17_2", node="n1", restarts=2, grace_seconds=30.0)
NOW = 1_800_000_000.0


class Clock:
    """The module's clocks, which tests set."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return NOW + self.now

    localtime = staticmethod(gmtime)
    strftime = staticmethod(strftime)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(_stops, "time", clock)
    return clock


Make = Callable[..., Stops]


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def make(clock: Clock, notes: list[str]) -> Make:
    def stops(known: JobEnvironment = JOB, timeout: float | None = None) -> Stops:
        made = Stops(
            began=0.0,
            timeout=timeout,
            known=known,
            grace_seconds=known.grace_seconds,
            note=notes.append,
        )
        made.nothing_begun = False
        return made

    return stops


@pytest.mark.parametrize(("grace", "expected"), [(15, 10), (30, 25), (120, 115), (6, 4), (3, 2)])
def test_some_of_the_grace_period_is_left_to_leave(grace: float, expected: float) -> None:
    """Five seconds, or a third where that is less."""
    assert suspending_seconds(grace) == expected


def test_without_a_bound_nothing_ends(make: Make, clock: Clock, notes: list[str]) -> None:
    """A host without a manager and without ``--timeout`` goes on."""
    stops = make(JobEnvironment())
    stops.expect_end_of_job(None)
    clock.now = 1e9
    assert not stops.is_over(1.0)
    assert (stops.at, stops.seconds_left()) == (math.inf, None)
    assert notes == []


def test_all_is_suspended_a_grace_period_before_the_job_ends(
    make: Make, clock: Clock, notes: list[str]
) -> None:
    """The end is told at first, and once more when it comes."""
    stops = make()
    stops.expect_end_of_job(NOW + 100.0)
    clock.now = 69.0
    assert not stops.is_over(1.0)
    assert stops.seconds_left() == pytest.approx(1.0)
    assert not stops.from_outside
    clock.now = 71.0
    assert stops.is_over(1.0)
    assert stops.is_over(1.0)
    assert stops.from_outside
    assert notes == [
        "Job 17_2 of SLURM on n1, begun again 2 times: all is suspended 30 s before its end, "
        "2027-01-15 08:01:40.",
        "Job 17_2 ends in 29 s. Suspending every live trial.",
    ]


@pytest.mark.parametrize(("lasts", "refused"), [(30.0, True), (31.0, False)])
def test_a_job_that_is_as_short_as_its_grace_period(
    make: Make, lasts: float, refused: bool
) -> None:
    """It is refused, since it would be begun again for ever; not one that is nearly over."""
    stops = make(JobEnvironment(job="17", began_at=NOW + 1.0 - lasts, grace_seconds=30.0))
    with pytest.raises(InvalidInputError, match="must last") if refused else nullcontext():
        stops.expect_end_of_job(NOW + 1.0)


def test_a_job_whose_end_is_not_known(make: Make, notes: list[str]) -> None:
    """The user is told what to do about it."""
    stops = make()
    stops.expect_end_of_job(None)
    assert stops.at == math.inf
    (text,) = notes
    assert text.endswith(": its end is not known, so end the call with --timeout before it.")


def test_the_calls_own_time_counts_where_it_is_over_first(
    make: Make, clock: Clock, notes: list[str]
) -> None:
    """It is no reason to make the same call again."""
    stops = make(timeout=50.0)
    stops.expect_end_of_job(NOW + 100.0)
    clock.now = 50.5
    assert stops.is_over(1.25)
    assert not stops.from_outside
    assert notes[1] == (
        "The time is over: 50.5 s, 1.2 s of it until the objective was imported. Suspending every "
        "live trial."
    )


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP], ids=lambda x: x.name
)
def test_a_managers_signal_ends_the_call_from_outside(
    make: Make, notes: list[str], number: signal.Signals
) -> None:
    """It is named, with the time that suspending may take; a second one changes nothing."""
    stops = make(JobEnvironment())
    with stops.heeds_signals():
        signal.raise_signal(number)
        signal.raise_signal(signal.SIGTERM)
    assert stops.is_over(1.0)
    assert stops.from_outside
    stops.note_signal()
    stops.note_signal()
    assert notes == [f"{number.name}: suspending every live trial, within 10 s."]


def test_ctrl_c_is_the_users(make: Make) -> None:
    """A signal that follows it is no other reason."""
    stops = make(JobEnvironment())
    with stops.heeds_signals():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
    assert stops.is_over(1.0)
    assert not stops.from_outside


def test_before_anything_is_begun_a_signal_ends_the_call(make: Make) -> None:
    """There is nothing to suspend, and the objective may take long to import."""
    stops = make(JobEnvironment())
    stops.nothing_begun = True
    with pytest.raises(KeyboardInterrupt), stops.heeds_signals():
        signal.raise_signal(signal.SIGUSR1)
    assert stops.from_outside


def test_handlers_of_a_script_are_kept(make: Make) -> None:
    """Its own for SIGUSR1 is called, and those that were replaced are set again."""
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    old = signal.getsignal(signal.SIGTERM)
    try:
        stops = make(JobEnvironment())
        with stops.heeds_signals():
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert heard == [signal.SIGUSR1]
    assert signal.getsignal(signal.SIGTERM) == old
    assert not stops.is_over(1.0)


def test_handlers_of_a_program_around_python_are_kept(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python does not know them (R's, uWSGI's), so it could not set them again."""
    handled: list[int] = []

    def handle(number: int, handler: object) -> signal.Handlers:
        handled.append(number)
        return signal.SIG_DFL

    monkeypatch.setattr(signal, "signal", handle)
    unknown = (signal.SIGINT, signal.SIGUSR1)
    monkeypatch.setattr(
        signal, "getsignal", lambda number: None if number in unknown else signal.SIG_DFL
    )
    with make(JobEnvironment()).heeds_signals():
        assert {*handled} == {signal.SIGHUP, signal.SIGTERM, signal.SIGUSR2}


def test_the_first_signal_says_when_it_is_late(make: Make, clock: Clock) -> None:
    """A second one gives no more time, nor does a time limit that comes later."""
    stops = make(JobEnvironment(grace_seconds=15.0), timeout=50.0)
    assert stops.late_at == 60.0
    for clock.now in (3.0, 7.0):
        stops.interrupt(signal.SIGTERM)
    assert stops.late_at == 13.0
