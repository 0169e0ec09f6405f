"""The reports, refusals and leftovers of ``HermesCallback``."""

from __future__ import annotations

import copy
import dataclasses
import gc
import hashlib
import itertools
import sys
import weakref
from collections import UserDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import optuna
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.connectors import checkpoint_connector
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from optuna_hermes.errors import CheckpointError, InvalidInputError, MonitorError, Suspended
from optuna_hermes.lightning import HermesCallback
from optuna_hermes.model import Checkpoint
from optuna_hermes.testing import FakeSession


class Line(LightningModule):
    """Four weights, and metrics named by the test."""

    def __init__(self, odd: object = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch[0]).square().mean()
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("late", float(self.current_epoch))

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.layer(batch[0]).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Configuration(UserDict[str, Any]):
    """Stands for a configuration of OmegaConf's, which no version for all our tests is of."""


class Configured(Line):
    """Has a configuration as its hyper-parameters, and Lightning stores the class of that."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters(Configuration(lr=0.01))


@dataclasses.dataclass
class Oddity:
    """Value that only pickle can store."""

    text: str = ""


class Ticks(Callback):
    def __init__(self, session: FakeSession) -> None:
        self._tick = session.tick

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._tick()


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.ones(4) * index for index in range(6))


class Batches:
    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        return iter([[torch.ones(1, 4)]] * len(self))

    def __len__(self) -> int:
        return 3


class Infinite(DataLoader[Any]):
    """Goes on with one iterator in all epochs."""

    def __init__(self, data: Any) -> None:
        super().__init__(data, batch_size=1)
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Any:
        return itertools.islice(self.iterator, len(self))


WORKERS = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "fork"}


def data(**options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(24.0).reshape(6, 4)), batch_size=1, **options)


def ask(direction: str = "minimize", **parts: Any) -> optuna.Trial:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(direction=direction, **parts).ask()


def trainer(hermes: HermesCallback, session: FakeSession | None = None, **options: Any) -> Trainer:
    watch = [] if session is None else [Ticks(session)]
    settings: dict[str, Any] = {
        "max_epochs": 3,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "callbacks": [hermes, *watch, *options.pop("callbacks", [])],
    }
    return Trainer(**{**settings, **options})


def fit(
    session: FakeSession | None,
    *,
    monitor: str = "val_loss",
    trial: optuna.Trial | None = None,
    module: LightningModule | None = None,
    loader: Any = None,
    **options: Any,
) -> HermesCallback:
    hermes = HermesCallback(trial or ask(), monitor, _session=session)
    batches = data() if loader is None else loader
    trainer(hermes, session, **options).fit(module or Line(), batches, data())
    return hermes


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


# -- units -------------------------------------------------------------------------------------


def test_without_session() -> None:
    """Under plain Optuna every validation is reported to the trial, counted from 1."""
    trial = ask()
    hermes = fit(None, trial=trial)
    reported = trial.study.trials[0].intermediate_values
    assert list(reported) == [1, 2, 3]
    assert hermes.value == reported[3]


def test_a_copy_of_a_callback_trains_the_same_trial() -> None:
    """A library may fit a deep copy of a model with its callbacks; the user has the first one."""
    session = FakeSession()
    hermes = HermesCallback(ask(), "val_loss", _session=session)
    trainer(copy.deepcopy(hermes), session).fit(Line(), data(), data())
    assert [unit for unit, *_ in session.reports] == [1, 2, 3]
    assert hermes.value == session.reports[-1][2]


def test_a_callback_s_class_that_the_objective_makes_goes_with_its_trial() -> None:
    """Objects of one class are of one class, but no cache keeps it."""

    def made() -> weakref.ref[Any]:
        class Own(HermesCallback):
            pass

        first, second = Own(ask(), "val_loss"), Own(ask(), "val_loss")
        assert type(first) is type(second)
        assert isinstance(first, Own)
        return weakref.ref(Own)

    kind = made()
    gc.collect()
    assert kind() is None


def test_pruned() -> None:
    """Under plain Optuna the study's pruner stops the run."""
    trial = ask(pruner=optuna.pruners.ThresholdPruner(upper=-1.0))
    with pytest.raises(optuna.TrialPruned, match="after unit 1 at val_loss="):
        fit(None, trial=trial)


def test_a_frozen_trial() -> None:
    """The best trial may be trained once more by its objective; it has no hash, and stays equal."""
    best: Any = optuna.trial.create_trial(value=1.0)
    before = dict(vars(best))
    assert fit(None, trial=best).value is not None
    assert vars(best) == before


def test_maximized_values_are_turned_for_the_session_only() -> None:
    """The session gets lower-is-better values, the user and Optuna get the metric."""
    session, trial = FakeSession(), ask("maximize")
    hermes = fit(session, trial=trial)
    assert hermes.value is not None
    assert hermes.value > 0
    assert session.reports[-1] == (3, 3, -hermes.value)
    assert trial.study.trials[0].intermediate_values[3] == hermes.value


@pytest.mark.parametrize("monitor", ["train_loss", "late"])
def test_training_metric(monitor: str) -> None:
    """A metric that only training logs is a unit at the end of each epoch, whose mean it is."""
    session = FakeSession()
    hermes = fit(session, monitor=monitor)
    assert [unit for unit, *_ in session.reports] == [1, 2, 3]
    if monitor == "late":
        assert [value for *_, value in session.reports] == [0.0, 1.0, 2.0]
        assert hermes.value == 2.0


@pytest.mark.parametrize(
    ("options", "units"),
    [
        ({"check_val_every_n_epoch": 2}, 1),
        ({"check_val_every_n_epoch": None, "val_check_interval": 8}, 2),
        ({"val_check_interval": 0.5}, 6),
    ],
)
def test_validations_that_are_not_epochs(options: dict[str, Any], units: int) -> None:
    """Each validation is a unit, however often there is one."""
    session = FakeSession()
    fit(session, **options)
    assert [unit for unit, *_ in session.reports] == list(range(1, units + 1))


@pytest.mark.parametrize(
    "options",
    [{}, {"limit_val_batches": 0}, {"check_val_every_n_epoch": 9}, {"max_epochs": 1}],
)
def test_metric_that_does_not_exist(options: dict[str, Any]) -> None:
    """A misspelled monitor ends the run after its first epoch, naming what there is."""
    with pytest.raises(MonitorError, match=r"'val_los'.*late.*train_loss") as caught:
        fit(FakeSession(), monitor="val_los", **options)
    assert "\n" not in str(caught.value)


def test_a_metric_of_single_steps_of_a_validation() -> None:
    """It has no value for the validation, so it is none of the metrics that are there."""

    class ByStep(Line):
        def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
            self.log("val_loss", self.layer(batch[0]).mean(), on_step=True, on_epoch=False)

    with pytest.raises(MonitorError, match=r"'val_loss'.*late.*train_loss"):
        fit(FakeSession(), module=ByStep())


# -- where a run waits -------------------------------------------------------------------------


def test_first_batch_is_told_once_a_grant(tmp_path: Path) -> None:
    """The session learns of the first batch, and whether the run can be stored, at every grant."""
    session = FakeSession({4: "resident"}, checkpoint_dir=tmp_path)
    fit(session)
    assert session.trainings == [True, True]
    assert session.beats


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("no folder", {}),
        ("two streams", {"loader": {"a": DataLoader(Stream(), 1), "b": DataLoader(Stream(), 1)}}),
        ("one of two loaders", {"loader": {"a": data(), "b": Batches()}}),
        ("not a DataLoader", {"loader": Batches()}),
        ("an iterator of its own", {"loader": Infinite(TensorDataset(torch.ones(6, 4)))}),
        ("one pool of workers for two", {"loader": dict.fromkeys("ab", data(**WORKERS))}),
    ],
)
def test_trials_that_cannot_be_stored(case: str, options: dict[str, Any], tmp_path: Path) -> None:
    """A run that could not come back exactly waits in memory, whatever tier it is asked for."""

    class First(Line):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x = batch["a"] if isinstance(batch, dict) else batch
            return super().training_step(x if isinstance(x, list) else [x], 0)

    folder = None if case == "no folder" else tmp_path
    session = FakeSession({2: "disk", 5: "disk"}, checkpoint_dir=folder)
    fit(session, module=First(), **options)
    assert session.parks == ["resident", "resident"]
    assert not any(session.trainings)
    assert not session.states


class Sharded(SingleDeviceStrategy):
    """Stands for FSDP and its like on one device: they load checkpoints by themselves."""

    restore_checkpoint_after_setup = True


def test_a_sharded_strategy_is_refused_on_one_device_too(tmp_path: Path) -> None:
    """It would begin anew in the next process, since its own loading of checkpoints is replaced."""
    device = torch.device("cpu")
    with pytest.raises(InvalidInputError, match="Sharded shards it, also on one device"):
        fit(FakeSession(checkpoint_dir=tmp_path), strategy=Sharded(device))
    assert fit(None, strategy=Sharded(device)).value is not None


def test_iterator_in_the_training_step(tmp_path: Path) -> None:
    """A training step that fetches by itself waits in memory too."""

    class Fetches(Line):
        def training_step(self, dataloader_iter: Iterator[Any]) -> torch.Tensor:  # type: ignore[override]
            batch, *_ = next(dataloader_iter)
            return self.layer(batch[0]).square().mean()  # type: ignore[no-any-return]

        def on_train_epoch_end(self) -> None:
            pass

    session = FakeSession({2: "disk"}, checkpoint_dir=tmp_path)
    fit(session, module=Fetches())
    assert session.parks == ["resident"]


class Caches(Line):
    """Makes a class on first use, as libraries do for what their networks return."""

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.use()
        super().validation_step(batch, batch_idx)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.use()
        return super().training_step(batch, batch_idx)

    def use(self) -> None:
        if not hasattr(self, "output"):
            self.output = type("Output", (), {})


def test_a_class_made_on_first_use(tmp_path: Path) -> None:
    """A resumed trial lacks what the validation before the first batch has made, and is stored."""
    session = FakeSession({2: "disk"}, checkpoint_dir=tmp_path)
    for after in (3, 4):
        with pytest.raises(Suspended):
            fit(session, module=Caches())
        session = session.again({after: "disk"})
    with pytest.raises(Suspended):
        fit(session, module=Caches())


def test_second_fit(tmp_path: Path) -> None:
    """In a second fit of the same trial units count on, and nothing is stored or resumed."""
    session = FakeSession(checkpoint_dir=tmp_path)
    hermes = HermesCallback(ask(), "val_loss", _session=session)
    for _ in range(2):
        trainer(hermes, session).fit(Line(), data(), data())
    assert [unit for unit, *_ in session.reports] == [1, 2, 3, 4, 5, 6]
    assert session.trainings == [True, False]


def test_searches_are_no_fits(tmp_path: Path) -> None:
    """A trial that looks for a learning rate first is stored, and does not look again later."""

    class Rated(Line):
        lr = 0.01
        batches = 0

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            self.batches += 1
            return super().training_step(batch, batch_idx)

    def process(session: FakeSession) -> list[Any]:
        hermes, module = HermesCallback(ask(), "val_loss", _session=session), Rated()
        made = trainer(hermes, session)
        options: dict[str, Any] = {"num_training": 15, "early_stop_threshold": None}
        result = Tuner(made).lr_find(module, data(), **options)
        searched.append(module.batches)
        made.fit(module, data(), data())
        assert result is not None
        return [module.lr, result.suggestion()]

    searched: list[int] = []
    session = FakeSession({7: "disk"}, checkpoint_dir=tmp_path)
    with pytest.raises(Suspended):
        process(session)
    after = session.again()
    lr, suggestion = process(after)
    assert lr == suggestion != Rated.lr
    assert session.trainings == after.trainings == [True]
    assert [unit for unit, *_ in (*session.reports, *after.reports)] == [1, 2, 3]
    assert searched == [15, 0]


@pytest.mark.parametrize(("scheduled", "searches"), [(False, False), (True, False), (True, True)])
def test_a_callback_for_each_fit(scheduled: bool, searches: bool, tmp_path: Path) -> None:
    """As in a loop over folds: units count on, and each callback has the value of its own fit."""
    session, trial = FakeSession(checkpoint_dir=tmp_path) if scheduled else None, ask()
    values = []
    for _ in range(3):
        hermes = HermesCallback(trial, "val_loss", _session=session)
        made, module = trainer(hermes, session), Line()
        if searches:
            Tuner(made).lr_find(module, data(), num_training=3, update_attr=False)
        made.fit(module, data(), data())
        values.append(hermes.value)
    reported = trial.study.trials[0].intermediate_values
    assert sorted(reported) == list(range(1, 10))
    assert values == [reported[3], reported[6], reported[9]]
    if session is not None:
        assert [unit for unit, *_ in session.reports] == list(range(1, 10))
        assert session.trainings == [True, False, False]


def test_two_callbacks_in_one_trainer() -> None:
    """Both would count the same units: that is refused."""
    session, trial = FakeSession(), ask()
    first, second = (HermesCallback(trial, "val_loss", _session=session) for _ in range(2))
    both = trainer(first, session)
    both.callbacks.append(second)
    with pytest.raises(InvalidInputError, match="Trial 0 has more than one HermesCallback"):
        both.fit(Line(), data(), data())


def test_a_mock_among_the_callbacks(tmp_path: Path) -> None:
    """An object that only answers like a callback does not keep a trial from disk."""

    def mock() -> Callback:
        made: Any = Mock(spec=Callback, state_key="mock")
        made.state_dict.return_value = {}
        return made  # type: ignore[no-any-return]

    session = FakeSession({2: "resident", 4: "disk"}, checkpoint_dir=tmp_path)
    with pytest.raises(Suspended):
        fit(session, callbacks=[mock()])
    assert fit(session.again(), callbacks=[mock()]).value is not None


# -- checkpoints -------------------------------------------------------------------------------


def stored(folder: Path, **options: Any) -> FakeSession:
    """A run that was stored after its second unit, with two checkpoints."""
    session = FakeSession({14: "disk"}, checkpoint_dir=folder)
    with pytest.raises(Suspended):
        fit(session, **options)
    return session.again()


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (flip, "is damaged"),
    (cut, "must have"),
    (Path.unlink, "cannot be read"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_damaged_checkpoint(
    damage: Callable[[Path], None],
    message: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The checkpoint before a damaged one is used, with a warning that names the file and trial."""
    session = stored(tmp_path)
    newest, before = session.checkpoints
    damage(Path(newest.path))
    fit(session)
    assert f"{Path(newest.path).name} of trial 0 {message}" in caplog.text
    assert [unit for unit, *_ in session.reports] == [3]
    assert before.units == 2


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_no_good_checkpoint(damage: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    """A run none of whose checkpoints is good is an error, never a restart from epoch 0."""
    session = stored(tmp_path)
    for state in session.checkpoints:
        damage(Path(state.path))
    with pytest.raises(CheckpointError, match=f"No checkpoint of trial 0 can be used.*{message}"):
        fit(session)
    assert session.reports == []


class Unheard(FakeSession):
    """A session whose ledger hears of nothing any more, as after the death of the broker."""

    def saved(self, state: Checkpoint, *, blocked_seconds: float = 0.0) -> None:
        self.states.append(state)


def test_what_the_ledger_names_outlives_later_checkpoints(tmp_path: Path) -> None:
    """A run that trains on without a broker does not take away what it will be resumed from."""
    known = stored(tmp_path).checkpoints
    session = Unheard(checkpoint_dir=tmp_path, checkpoints=known)
    fit(session, max_epochs=8)
    assert len(session.states) >= 3
    assert all(Path(state.path).exists() for state in known)


def test_checkpoint_of_another_trial(tmp_path: Path) -> None:
    """A checkpoint is only ever used for the trial that wrote it."""
    session = stored(tmp_path)
    study = ask().study
    with pytest.raises(CheckpointError, match="must be of trial 1 but is of trial 0"):
        fit(session, trial=study.ask())


def test_foreign_file(tmp_path: Path) -> None:
    """A file that would have to be unpickled is refused even if its digest is right."""
    session = stored(tmp_path)
    path = Path(session.checkpoints[0].path)
    torch.save({"optuna_hermes": object()}, path)
    content = path.read_bytes()
    forged = Checkpoint(
        path=str(path), units=2, size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest()
    )
    session.checkpoints = (forged,)
    with pytest.raises(CheckpointError, match="must be a file that optuna-hermes wrote"):
        fit(session)


def test_state_that_could_not_be_loaded(tmp_path: Path) -> None:
    """A callback whose state needs pickle is an error at the first checkpoint, which goes again."""

    class Odd(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"odd": Oddity()}

    session = FakeSession(checkpoint_dir=tmp_path)
    with pytest.raises(CheckpointError, match=r"trial 0 must hold only .*Odd"):
        fit(session, callbacks=[Odd()])
    assert list(tmp_path.iterdir()) == []


def test_odd_hyperparameters(tmp_path: Path) -> None:
    """Arguments of the module that need pickle stay out of the checkpoint: nobody needs them."""
    session = stored(tmp_path, module=Line(odd=Oddity()))
    fit(session, module=Line(odd=Oddity()))
    assert [unit for unit, *_ in session.reports] == [3]


def test_hyperparameters_of_omegaconf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module whose hyper-parameters are a configuration is stored without them."""
    library: Any = ModuleType("omegaconf")
    library.Container = Configuration
    monkeypatch.setitem(sys.modules, "omegaconf", library)
    monkeypatch.setattr(checkpoint_connector, "_OMEGACONF_AVAILABLE", True)
    session = stored(tmp_path, module=Configured())
    fit(session, module=Configured())
    assert [unit for unit, *_ in session.reports] == [3]


def test_own_ckpt_path(tmp_path: Path) -> None:
    """The run's own checkpoint wins over the one that the objective gives to fit."""
    plain = Trainer(max_epochs=1, logger=False, enable_progress_bar=False, accelerator="cpu",
                    default_root_dir=tmp_path)  # fmt: skip
    plain.fit(Line(), data(), data())
    plain.save_checkpoint(tmp_path / "pretrained.ckpt")
    session = stored(tmp_path / "run")
    hermes = HermesCallback(ask(), "val_loss", _session=session)
    own = trainer(hermes, session)
    own.fit(Line(), data(), data(), ckpt_path=tmp_path / "pretrained.ckpt")
    assert [unit for unit, *_ in session.reports] == [3]
    assert own.global_step == 18


def test_own_ckpt_path_is_kept(tmp_path: Path) -> None:
    """ModelCheckpoint never deletes the file that the objective gives to fit, as without us."""
    before = Trainer(max_epochs=1, logger=False, enable_progress_bar=False, accelerator="cpu",
                     callbacks=[ModelCheckpoint(tmp_path, monitor="step", mode="max")])  # fmt: skip
    before.fit(Line(), data(), data())
    (mine,) = tmp_path.glob("*.ckpt")
    session = FakeSession({2: "disk"}, checkpoint_dir=tmp_path / "run")
    for expects_end in (False, True):
        saves = ModelCheckpoint(tmp_path, monitor="step", mode="max")
        hermes = HermesCallback(ask(), "val_loss", _session=session)
        own = trainer(hermes, session, callbacks=[saves], enable_checkpointing=True)
        if expects_end:
            own.fit(Line(), data(), data(), ckpt_path=mine)
        else:
            with pytest.raises(Suspended):
                own.fit(Line(), data(), data(), ckpt_path=mine)
        session = session.again()
    assert mine.exists()
    assert len(list(tmp_path.glob("*.ckpt"))) == 2


# -- what is left behind -----------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, WORKERS])
def test_trials_without_checkpoints_may_share_a_loader(options: dict[str, Any]) -> None:
    """It stays as it is: threads of a plain study begin and end their trials in any order."""
    loader = data(**options)
    own, seen = loader.batch_sampler, []

    class Watch(Callback):
        def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
            seen.append((loader.batch_sampler is own, "_get_iterator" in vars(loader)))

    fit(FakeSession(), loader=loader, callbacks=[Watch()])
    assert set(seen) == {(True, False)}


def test_nothing_is_left_in_the_trainer(tmp_path: Path) -> None:
    """After a suspension, and after a resumed fit, trainer and loader are as before."""
    session = FakeSession({14: "disk"}, checkpoint_dir=tmp_path)
    loader = data()
    before = dict(vars(loader))
    for expects_end in (False, True):
        hermes = HermesCallback(ask(), "val_loss", _session=session)
        own = trainer(hermes, session)
        if expects_end:
            own.fit(Line(), loader, data())
        else:
            with pytest.raises(Suspended):
                own.fit(Line(), loader, data())
        owners = (own.fit_loop, own.fit_loop.epoch_loop, own._checkpoint_connector)
        assert not any(
            callable(v) and k in dir(type(o)) for o in owners for k, v in vars(o).items()
        )
        assert {k: v for k, v in vars(loader).items() if k != "_iterator"} == {
            k: v for k, v in before.items() if k != "_iterator"
        }
        session = session.again()


def test_users_checkpoints_need_no_hermes(tmp_path: Path) -> None:
    """A checkpoint of ModelCheckpoint from the middle of an epoch loads in a Trainer without us."""
    saves = ModelCheckpoint(tmp_path / "models", every_n_train_steps=4, save_top_k=-1)
    session = stored(tmp_path / "run", callbacks=[saves], enable_checkpointing=True, max_epochs=4)
    later = ModelCheckpoint(tmp_path / "models", every_n_train_steps=4, save_top_k=-1)
    fit(session, callbacks=[later], enable_checkpointing=True, max_epochs=4)
    alone = ModelCheckpoint(tmp_path / "alone", every_n_train_steps=4, save_top_k=-1)
    trained_plainly(alone)
    names = sorted(path.name for path in (tmp_path / "models").iterdir())
    assert len(names) == 6
    assert names == sorted(path.name for path in (tmp_path / "alone").iterdir())
    for name in names:
        steps = trained_plainly(ckpt_path=tmp_path / "models" / name)
        # 24, save that Lightning before 2.5 trains a batch again.
        assert steps == trained_plainly(ckpt_path=tmp_path / "alone" / name)


def trained_plainly(*callbacks: Callback, ckpt_path: Path | None = None) -> int:
    """The steps that a Trainer without a callback of ours has done in the end."""
    plain = Trainer(max_epochs=4, logger=False, enable_progress_bar=False, accelerator="cpu",
                    enable_checkpointing=bool(callbacks), callbacks=list(callbacks))  # fmt: skip
    plain.fit(Line(), data(), data(), ckpt_path=ckpt_path)
    return plain.global_step


def test_progress_bars(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The default progress bar works in a fit that goes on in the middle of an epoch."""
    fit(stored(tmp_path), enable_progress_bar=True)
    assert "Epoch" in capsys.readouterr().out
