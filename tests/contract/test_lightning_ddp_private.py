"""The parts of Lightning and torch on which trials in several processes rely without a promise.

If a test here fails after an upgrade, look at ``_lightning/_ddp.py`` and ``_launches.py`` first.
"""

from __future__ import annotations

import inspect
import json
import os
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.call import _interrupt
from lightning.pytorch.trainer.states import TrainerFn
from optuna.trial import FixedTrial
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from optuna_hermes._lightning._ddp import why_not_exact
from optuna_hermes.lightning import HermesCallback

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


class Notes(Callback):
    """Appends a line to a file in each process: these ranks share no memory."""

    def __init__(self, path: Path, fails: Callable[[int], None] = lambda rank: None) -> None:
        self._path = path
        self._fails = fails

    def note(self, *line: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def read(self) -> list[Any]:
        return sorted(json.loads(line) for line in self._path.read_text().splitlines())

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.note("setup", trainer.global_rank, os.environ["LOCAL_RANK"], random.random())
        self._fails(trainer.global_rank)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self.note("exception", os.getpid(), type(exception).__name__)


def trainer_of(strategy: str, *callbacks: Callback, devices: int = 2) -> Trainer:
    torch.set_num_threads(1)
    return Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        fast_dev_run=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
    )


@pytest.mark.parametrize("launcher", [_MultiProcessingLauncher, _SubprocessScriptLauncher])
def test_launch_is_watched_once(launcher: type[Any]) -> None:
    """``launch`` has the arguments that are handed on, and making a callback wraps it, once."""
    HermesCallback(FixedTrial({}), "loss")
    HermesCallback(FixedTrial({}), "loss")
    watched = inspect.getattr_static(launcher, "launch")
    wrapped, find = watched.args
    assert list(inspect.signature(wrapped).parameters) == [
        "self",
        "function",
        "args",
        "trainer",
        "kwargs",
    ]
    callback = HermesCallback(FixedTrial({}), "loss")
    assert find(trainer_of("auto", callback, devices=1)) is callback._loop


def test_the_function_runs_in_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``fit`` gives its function to ``launch``, and each rank finds its number in LOCAL_RANK."""
    calls: list[tuple[str, int, TrainerFn | None]] = []
    launch = _MultiProcessingLauncher.launch

    def watch(launcher: Any, function: Any, *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        calls.append((launcher._start_method, launcher._strategy.num_processes, trainer.state.fn))
        return launch(launcher, function, *args, trainer=trainer, **kwargs)

    monkeypatch.setattr(_MultiProcessingLauncher, "launch", watch)
    notes = Notes(tmp_path / "notes")
    trainer_of("ddp_fork", notes).fit(BoringModel())
    assert calls == [("fork", 2, TrainerFn.FITTING)]
    assert [line[1:3] for line in notes.read()] == [[0, "0"], [1, "1"]]


def test_a_fork_seeds_python_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork seeds Python anew, so ranks get the random state of the process that starts them."""
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)  # another test's, and Lightning's next seed
    random.seed(1)
    expected = random.Random(1).random()
    notes = Notes(tmp_path / "notes")
    trainer_of("ddp_fork", notes).fit(BoringModel())
    assert expected not in [line[3] for line in notes.read()]


def test_an_exception_of_a_rank_is_unwound_elsewhere(tmp_path: Path) -> None:
    """``on_exception`` is called in the process that called ``fit``, and in no rank."""

    def fails(rank: int) -> None:
        raise LookupError

    notes = Notes(tmp_path / "notes", fails)
    with pytest.raises(ProcessRaisedException):
        trainer_of("ddp_fork", notes).fit(BoringModel())
    assert notes.read()[0] == ["exception", os.getpid(), "ProcessRaisedException"]
    assert [line[0] for line in notes.read()].count("exception") == 1


def test_a_killed_rank_is_named_by_its_signal(tmp_path: Path) -> None:
    """Torch says which signal ended a process."""

    def fails(rank: int) -> None:
        os.kill(os.getpid(), 9)

    with pytest.raises(ProcessExitedException) as raised:
        trainer_of("ddp_fork", Notes(tmp_path / "notes", fails)).fit(BoringModel())
    assert raised.value.signal_name == "SIGKILL"


def test_unwinding_by_hand(tmp_path: Path) -> None:
    """``_interrupt`` tells the callbacks, and ``_teardown`` may follow, as when ``fit`` raises."""
    notes = Notes(tmp_path / "notes")
    trainer = trainer_of("ddp_fork", notes)
    trainer.strategy._lightning_module = BoringModel()
    _interrupt(trainer, LookupError())
    trainer._teardown()
    assert notes.read() == [["exception", os.getpid(), "LookupError"]]


def test_no_weights_are_handed_over_without_a_function() -> None:
    """Results of a trainer that does not fit come without a file of weights."""
    trainer = trainer_of("ddp_fork")
    trainer.strategy._lightning_module = BoringModel()
    assert trainer.state.fn is None
    launcher = _MultiProcessingLauncher(trainer.strategy, start_method="fork")
    output = launcher._collect_rank_zero_results(trainer, None)
    assert output is not None
    assert output.weights_path is None


def test_scripts_are_started_by_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strategy ``ddp`` starts nothing before ``launch``, and its launcher has no start method."""
    monkeypatch.setattr(_SubprocessScriptLauncher, "launch", lambda *args, **kwargs: "launched")
    monkeypatch.setattr(subprocess, "Popen", None)
    trainer = trainer_of("ddp")
    trainer.fit(BoringModel())
    assert isinstance(trainer.strategy.launcher, _SubprocessScriptLauncher)
    assert not hasattr(trainer.strategy.launcher, "_start_method")


@pytest.mark.parametrize(
    ("devices", "strategy", "exact"),
    [
        (2, "ddp_fork", True),
        (3, "ddp_fork", False),
        (3, "ddp_fork_find_unused_parameters_true", True),
    ],
)
def test_ddp_says_whether_it_moves_gradients(
    devices: int, strategy: str, exact: bool, tmp_path: Path
) -> None:
    """DDP keeps its buckets where it looks for unused parameters, and two numbers have one sum."""
    notes = Notes(tmp_path / "notes")

    class Asks(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            notes.note("exact", why_not_exact(trainer) is None)

    trainer_of(strategy, Asks(), devices=devices).fit(BoringModel())
    assert notes.read() == [["exact", exact]] * devices
