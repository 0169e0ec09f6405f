"""Clocks and progress bars of a Trainer, from which the time in which a trial waits is left out."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from optuna_hermes._lightning._namespace import (
    ModelCheckpoint,
    RichProgressBar,
    SimpleProfiler,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
    Trainer,
    callbacks_of,
)

_WINDOWS = ("_time", "_batches", "_samples", "_lengths", "_flops")
_COUNTS = ("_batches", "_samples", "_lengths")

_Clock = tuple[str, dict[Any, Any], Any]
"""A name, and the dictionary and key under which a point in time is kept."""


@contextlib.contextmanager
def parked(trainer: Trainer) -> Iterator[Callable[[], None]]:
    """Leave the time within, in which a trial is parked, out of all clocks.

    Yields a function that takes the wait until now out of the clocks, for a checkpoint that is
    written meanwhile; at the end this is done anyway.
    """
    since = time.monotonic()

    def leave_out_wait() -> None:
        nonlocal since
        since, begin = time.monotonic(), since
        leave_out(trainer, since - begin)

    try:
        yield leave_out_wait
    finally:
        leave_out_wait()


def leave_out(trainer: Trainer, seconds: float) -> None:
    """Take time that was not spent on training out of all clocks."""
    for _, where, key in [*_lasting_clocks(trainer), *_passing_clocks(trainer)]:
        # Moved forward by the wait, the start is as long ago as it was before.
        if where.get(key) is not None:
            where[key] += seconds
    bar = trainer.progress_bar_callback
    if isinstance(bar, RichProgressBar) and bar.progress is not None:
        for task in bar.progress.tasks:  # rich computes the speed from these samples
            samples = (s._replace(timestamp=s.timestamp + seconds) for s in task._progress)
            task._progress = deque(samples, task._progress.maxlen)


def clock_state(trainer: Trainer) -> dict[str, Any]:
    """The time on the clocks, and the counters that go with them."""
    now = time.monotonic()
    # Ages, not points in time: the monotonic clocks of two hosts have no common origin.
    return {
        "ages": {
            name: now - where[key]
            for name, where, key in _lasting_clocks(trainer)
            if where.get(key) is not None
        },
        "offsets": {key: timer._offset for key, timer in _callbacks(trainer, Timer)},
        "throughputs": {
            key: _throughput_state(monitor)
            for key, monitor in _callbacks(trainer, ThroughputMonitor)
        },
    }


def restore_clocks(trainer: Trainer, state: dict[str, Any]) -> None:
    """Restore what ``clock_state`` returned; to be called before the first fetch."""
    now = time.monotonic()
    for name, where, key in _lasting_clocks(trainer):
        if name in state["ages"]:
            where[key] = now - state["ages"][name]
    for key, timer in _callbacks(trainer, Timer):
        timer._offset = state["offsets"].get(key, timer._offset)
    for key, monitor in _callbacks(trainer, ThroughputMonitor):
        _restore_throughput(monitor, state["throughputs"].get(key, {}))
    bar = trainer.progress_bar_callback
    if isinstance(bar, TQDMProgressBar):
        _show_epoch(bar, trainer)


def show_length(trainer: Trainer) -> None:
    """Update the number of the epoch's batches in the progress bar."""
    bar = trainer.progress_bar_callback
    if isinstance(bar, TQDMProgressBar):
        _show_epoch(bar, trainer)
    elif isinstance(bar, RichProgressBar) and bar.progress is not None:
        task_id = bar.train_progress_bar_id
        if task_id is not None:
            bar.progress.update(task_id, total=float(bar.total_train_batches))


def _callbacks(trainer: Trainer, kind: type[Any]) -> list[tuple[str, Any]]:
    return [(each.state_key, each) for each in callbacks_of(trainer, kind)]


def _lasting_clocks(trainer: Trainer) -> Iterator[_Clock]:
    """Points on the monotonic clock that matter for the whole of a trial: restored with it."""
    for name, timer in _callbacks(trainer, Timer):
        for stage in timer._start_time:
            yield f"{name} {stage.value} start", timer._start_time, stage
            yield f"{name} {stage.value} end", timer._end_time, stage
    for name, saves in _callbacks(trainer, ModelCheckpoint):
        yield name, vars(saves), "_last_time_checked"
    for name, monitor in _callbacks(trainer, ThroughputMonitor):
        for stage in monitor._t0s:
            yield f"{name} {stage.value}", monitor._t0s, stage
    yield "validation", vars(trainer), "_last_val_time"


def _passing_clocks(trainer: Trainer) -> Iterator[_Clock]:
    """Points in time that matter for displays in this process only."""
    bar = trainer.progress_bar_callback
    profiler = trainer.profiler  # type: ignore[attr-defined]  # it is set by a function
    if isinstance(bar, TQDMProgressBar):
        for line in (bar._train_progress_bar, bar._val_progress_bar):
            for key in ("start_t", "last_print_t"):
                yield "tqdm", {} if line is None else vars(line), key
    if isinstance(bar, RichProgressBar) and bar.progress is not None:
        for task in bar.progress.tasks:
            yield "rich", vars(task), "start_time"
    if isinstance(profiler, SimpleProfiler):
        yield "profiler", vars(profiler), "start_time"
        for action in profiler.current_actions:
            yield "profiler", profiler.current_actions, action


def _show_epoch(bar: TQDMProgressBar, trainer: Trainer) -> None:
    """Show epoch and position; Lightning only does so where an epoch begins."""
    line, total = bar._train_progress_bar, bar.total_train_batches
    if line is None or line.disable:
        return
    line.reset()  # its argument None would keep the total, where the length is now unknown
    line.total = None if math.isinf(total) else total
    line.n = line.initial = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    line.set_description(f"Epoch {trainer.current_epoch}")


def _throughput_state(monitor: ThroughputMonitor) -> dict[str, Any]:
    return {
        stage.value: {
            "counts": [counts[stage] for counts in _counts(monitor)],
            "windows": [list(getattr(monitor._throughputs[stage], name)) for name in _WINDOWS],
        }
        for stage in monitor._t0s
    }


def _counts(monitor: ThroughputMonitor) -> list[dict[Any, Any]]:
    """Its counters beside the windows; before Lightning 2.6 the lengths were the only ones."""
    return [vars(monitor)[name] for name in _COUNTS if name in vars(monitor)]


def _restore_throughput(monitor: ThroughputMonitor, state: dict[str, Any]) -> None:
    for stage in monitor._throughputs:
        if stage.value not in state:
            continue
        saved = state[stage.value]
        for counts, count in zip(_counts(monitor), saved["counts"], strict=True):
            counts[stage] = count
        for name, values in zip(_WINDOWS, saved["windows"], strict=True):
            window = getattr(monitor._throughputs[stage], name)
            window.clear()
            window.extend(values)
