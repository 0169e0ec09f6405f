"""What counts time or shows progress around the training, and must not see that a run waited."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import (
    ModelCheckpoint,
    RichProgressBar,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.profilers import SimpleProfiler

_PARKED = " (parked)"
_WINDOWS = ("_time", "_batches", "_samples", "_lengths", "_flops")
_COUNTS = ("_batches", "_samples", "_lengths")

_Clock = tuple[str, dict[Any, Any], Any]
"""A name, and the dictionary and key under which a moment is kept."""


@contextlib.contextmanager
def parked(trainer: Trainer) -> Iterator[Callable[[], None]]:
    """Say in the progress bar that the run is parked, and let no clock see the time within.

    Gives a function that takes the wait until now out of the clocks, for a checkpoint that is
    taken meanwhile; at the end it is done anyway.
    """
    since = time.monotonic()

    def leave_out_wait() -> None:
        nonlocal since
        since, begin = time.monotonic(), since
        leave_out(trainer, since - begin)

    with _shown_as_parked(trainer.progress_bar_callback):
        try:
            yield leave_out_wait
        finally:
            leave_out_wait()


def leave_out(trainer: Trainer, seconds: float) -> None:
    """Take time that was not spent on training out of what counts time."""
    for _, where, key in [*_lasting_clocks(trainer), *_passing_clocks(trainer)]:
        if where.get(key) is not None:
            where[key] += seconds
    bar = trainer.progress_bar_callback
    if isinstance(bar, RichProgressBar) and bar.progress is not None:
        for task in bar.progress.tasks:  # from these it takes the speed
            samples = (s._replace(timestamp=s.timestamp + seconds) for s in task._progress)
            task._progress = deque(samples, task._progress.maxlen)


def around_state(trainer: Trainer) -> dict[str, Any]:
    """How far the clocks have run, and what counts on with them."""
    now = time.monotonic()
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


def restore_around(trainer: Trainer, state: dict[str, Any]) -> None:
    """Let the clocks go on from there; to be called before the first fetch."""
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
    """Let the progress bar know how many batches the epoch has by now."""
    bar = trainer.progress_bar_callback
    if isinstance(bar, TQDMProgressBar):
        _show_epoch(bar, trainer)
    elif isinstance(bar, RichProgressBar) and bar.progress is not None:
        task_id = bar.train_progress_bar_id
        if task_id is not None:
            bar.progress.update(task_id, total=float(bar.total_train_batches))


def ended(trainer: Trainer) -> bool:
    """Whether the process got SIGTERM; Lightning listens to it in the main thread only."""
    return trainer.received_sigterm


def _callbacks(trainer: Trainer, kind: type[Any]) -> list[tuple[str, Any]]:
    callbacks = trainer.callbacks  # type: ignore[attr-defined]  # it is set by a connector
    return [(each.state_key, each) for each in callbacks if isinstance(each, kind)]


def _lasting_clocks(trainer: Trainer) -> Iterator[_Clock]:
    """Moments on the monotonic clock from which something counts for the whole of a run."""
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
    """Moments from which something is shown in this process."""
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


@contextlib.contextmanager
def _shown_as_parked(bar: Any) -> Iterator[None]:
    text, show = _description(bar)
    if text is not None:
        show(text.removesuffix(": ").rstrip() + _PARKED + ": " * text.endswith(": "))
    try:
        yield
    finally:
        if text is not None:
            show(text)


def _description(bar: Any) -> tuple[str | None, Callable[[str], None]]:
    """The text beside the bar of training, None if none is shown, and what changes it."""
    if isinstance(bar, TQDMProgressBar):
        line = bar._train_progress_bar
        if line is not None and not line.disable:
            return line.desc, line.set_description_str
    elif isinstance(bar, RichProgressBar) and bar.progress is not None:
        progress, task_id = bar.progress, bar.train_progress_bar_id
        if task_id is not None:

            def show(text: str) -> None:
                progress.update(task_id, description=text)
                bar.refresh(hard=True)

            return progress.tasks[task_id].description, show
    return None, lambda text: None


def _show_epoch(bar: TQDMProgressBar, trainer: Trainer) -> None:
    """Lightning does it where an epoch begins; a run may go on in the middle of one."""
    line, total = bar._train_progress_bar, bar.total_train_batches
    if line is None or line.disable:
        return
    line.reset(total=None if math.isinf(total) else total)
    line.n = line.initial = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    line.set_description(f"Epoch {trainer.current_epoch}")


def _throughput_state(monitor: ThroughputMonitor) -> dict[str, Any]:
    return {
        stage.value: {
            "counts": [getattr(monitor, name)[stage] for name in _COUNTS],
            "windows": [list(getattr(monitor._throughputs[stage], name)) for name in _WINDOWS],
        }
        for stage in monitor._t0s
    }


def _restore_throughput(monitor: ThroughputMonitor, state: dict[str, Any]) -> None:
    for stage in monitor._throughputs:
        if stage.value not in state:
            continue
        saved = state[stage.value]
        for name, count in zip(_COUNTS, saved["counts"], strict=True):
            getattr(monitor, name)[stage] = count
        for name, values in zip(_WINDOWS, saved["windows"], strict=True):
            window = getattr(monitor._throughputs[stage], name)
            window.clear()
            window.extend(values)
