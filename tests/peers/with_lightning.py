"""Pytest plugin for Lightning's tests: each fit on a CPU in one process is a run of a real broker.

``--hermes=memory`` suspends it after its first batches, in turn to the tiers resident and host.
``--hermes=disk`` begins it in a process of its own, which ends with a suspension to disk after the
first batch; the test's own process carries it on, and suspends it as above.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Before pytest puts a checkout on the path: its tests are run with what is installed.
import lightning.pytorch as pl
import optuna
import pytest
import rooms
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.strategies import SingleDeviceStrategy

from optuna_hermes import _optuna
from optuna_hermes._lightning._units import Units
from optuna_hermes.broker import StudySpec, TrialSession, connect_or_start, sessions
from optuna_hermes.broker._protocol import Register
from optuna_hermes.errors import BrokerError, Suspended
from optuna_hermes.lightning import HermesCallback
from optuna_hermes.model import TierName

SUSPENSIONS = 8
"""So many in one process of a fit; tests with thousands of batches are about something else."""

_COUNTED = ("fits", "left alone", "resident", "host", "disk", "begun again")
_STORED = 75
_DEVICES = "cpu:1"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("peers")
    group.addoption("--hermes", choices=("memory", "disk"), help="where fits are suspended to")


def pytest_configure(config: pytest.Config) -> None:
    tiers = config.getoption("--hermes")
    if tiers is not None:
        plugin = _Plugin(rooms.own_folder(config), leaves=tiers == "disk")
        config.pluginmanager.register(plugin)
        pl.Trainer.fit = plugin.around(pl.Trainer.fit)  # type: ignore[method-assign]


class _Epochs(Units):
    """Every epoch is a unit, whatever a test logs."""

    def __init__(self, loop: Any) -> None:
        super().__init__("unit", loop.name)
        self._loop = loop

    def validated(self, trainer: pl.Trainer) -> bool:
        return False

    def epoch_done(self, trainer: pl.Trainer, *, last: bool) -> bool:
        ended, self._epoch_ended = self._epoch_ended, False
        return ended

    def read(self, trainer: pl.Trainer, *, several_devices: bool) -> float:
        return 1.0 / (self._loop._unit + 1)


class _Callback(HermesCallback):
    """The callback of a run whose slices are as long as its batches."""

    def __init__(self, trial: optuna.Trial, session: _Session) -> None:
        super().__init__(trial, "unit", _session=session)
        self._loop.units = _Epochs(self._loop)
        self._slices = session

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        super().on_train_batch_end(*args, **kwargs)
        self._slices.over()


class _Session(TrialSession):
    """A run that gives its device back after each of its first batches, by one tier after another.

    The broker chooses the tier resident, for CPU slots have room for all, and may end the first
    slice before anything is trained.
    """

    def __init__(self, *args: Any, tiers: tuple[TierName, ...], **options: Any) -> None:
        self._tiers = itertools.cycle(tiers)
        self._tier = next(self._tiers)
        self._yields = self._trained_any = False
        self.suspensions: list[TierName] = []
        super().__init__(*args, **options)

    @property
    def must_yield(self) -> bool:
        return self._yields and self._trained_any

    @must_yield.setter
    def must_yield(self, value: bool) -> None:
        self._yields = value

    @property
    def asked(self) -> TierName:
        return self._tier

    @asked.setter
    def asked(self, tier: TierName) -> None:
        pass

    def over(self) -> None:
        """A batch is trained."""
        self._trained_any = True
        self._yields = self._yields or len(self.suspensions) < SUSPENSIONS

    def park(self, state: Any) -> None:
        self.suspensions.append(self._tier)
        super().park(state)
        self._tier = next(self._tiers)


class _Plugin:
    def __init__(self, folder: Path, *, leaves: bool) -> None:
        self._folder = folder
        self._leaves = leaves
        self._study: optuna.Study | None = None
        self._item: pytest.Item | None = None
        self._inside = False
        self._counts = dict.fromkeys(_COUNTED, 0)

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._item = item

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.write_line(f"Hermes: {json.dumps(self._counts)}")

    def around(self, fit: Any) -> Any:
        """``Trainer.fit`` as a run that competes with another one."""

        @functools.wraps(fit)
        def fit_as_run(trainer: pl.Trainer, *args: Any, **kwargs: Any) -> Any:
            if self._inside or not _is_alone_on_cpu(trainer):
                self._counts["left alone"] += 1
                return fit(trainer, *args, **kwargs)
            self._inside = True
            try:
                self._counts["fits"] += 1
                trial = self._ask()
                call = functools.partial(fit, trainer, *args, **kwargs)
                if self._leaves and not self._begin_elsewhere(trial, trainer, call):
                    trial = self._ask()
                return self._run(trial, trainer, call, ("resident", "host"))
            finally:
                self._inside = False

        return fit_as_run

    def _ask(self) -> optuna.Trial:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        if self._study is None:
            storage = f"sqlite:///{self._folder / 'study.db'}"
            sampler, pruner = optuna.samplers.RandomSampler(), optuna.pruners.NopPruner()
            self._study = optuna.create_study(storage=storage, sampler=sampler, pruner=pruner)
            self._study.ask()  # the rival
        return self._study.ask()

    def _run(
        self, trial: optuna.Trial, trainer: pl.Trainer, call: Any, tiers: tuple[TierName, ...]
    ) -> Any:
        """A fit, or what is left of it, in this process."""
        spec = _optuna.study_spec(trial.study, policy="round-robin", slice_seconds=0.0)
        ask = Register(study=spec, number=trial.number, trial_id=trial._trial_id)
        session = _Session(_join(), spec, ask, reconnect=_join, tiers=tiers)
        hermes = _Callback(trial, session)
        try:
            session.wait_for_grant()
            session.checkpoint_dir = self._folder / "checkpoints" / f"trial-{trial.number:05d}"
            sessions.worker = session
            with _rival(spec), _among(trainer, hermes):
                return call()
        finally:
            sessions.worker = None
            for tier in session.suspensions:
                self._counts[tier] += 1
            if session.suspensions[-1:] != ["disk"]:
                session.end("done")
            session.close()

    # -- the process that comes before ---------------------------------------------------------

    def _begin_elsewhere(self, trial: optuna.Trial, trainer: pl.Trainer, call: Any) -> bool:
        """Begin a fit in a process that ends with it on disk; False if it could not go there."""
        with self._kept_files() as put_back:
            process = os.fork()
            if process == 0:
                self._be_the_first(trial, trainer, call)
            try:
                _, status = os.waitpid(process, 0)
            except BaseException:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
                raise
            stored = os.waitstatus_to_exitcode(status) == _STORED
            self._counts["disk" if stored else "begun again"] += 1
            if not stored:
                put_back()
            return stored

    def _be_the_first(self, trial: optuna.Trial, trainer: pl.Trainer, call: Any) -> None:
        code = 1
        try:
            self._run(trial, trainer, call, ("disk",))
        except Suspended:
            code = _STORED
        finally:
            os._exit(code)

    @contextlib.contextmanager
    def _kept_files(self) -> Iterator[Any]:
        """Call what is yielded to put the test's folder back as it is now."""
        folder = getattr(self._item, "funcargs", {}).get("tmp_path")
        copy = self._folder / "files"
        if folder is not None:
            shutil.copytree(folder, copy, symlinks=True)

        def put_back() -> None:
            if folder is not None:
                shutil.rmtree(folder)
                shutil.copytree(copy, folder, symlinks=True)
                with contextlib.suppress(OSError):
                    os.chdir(Path.cwd())

        try:
            yield put_back
        finally:
            shutil.rmtree(copy, ignore_errors=True)


def _is_alone_on_cpu(trainer: pl.Trainer) -> bool:
    strategy = trainer.strategy
    alone = type(strategy) is SingleDeviceStrategy and trainer.world_size == 1
    return alone and strategy.root_device.type == "cpu"


def _join() -> Any:
    return connect_or_start("plain", _DEVICES)


@contextlib.contextmanager
def _among(trainer: pl.Trainer, hermes: HermesCallback) -> Iterator[None]:
    """The callback among those of a trainer, before those that write checkpoints."""
    callbacks = trainer.callbacks
    first = next(
        (i for i, each in enumerate(callbacks) if isinstance(each, Checkpoint)), len(callbacks)
    )
    callbacks.insert(first, hermes)
    try:
        yield
    finally:
        for each in (callbacks, trainer.callbacks):
            with contextlib.suppress(ValueError):
                each.remove(hermes)


@contextlib.contextmanager
def _rival(spec: StudySpec) -> Iterator[None]:
    """Another run of the study, on a thread, which gives each lease back at once."""
    trial_id = 1
    ask = Register(study=spec, number=0, trial_id=trial_id)
    session = TrialSession(_join(), spec, ask, reconnect=_join)
    over = threading.Event()

    def train() -> None:
        with contextlib.suppress(BrokerError):
            session.wait_for_grant()
            while not over.is_set():
                session.started(can_store=False)
                session.park(None)

    thread = threading.Thread(target=train, name="rival", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        session._stop()
        thread.join()
        session.hang_up()
