"""Each piece of Lightning that is not promised is still what ``_lightning/`` takes it for.

If a test here fails after an upgrade, Lightning has changed that piece: look at ``_lightning/``
before anything else.
"""

from __future__ import annotations

import dataclasses
import inspect
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.throughput import Throughput
from lightning.pytorch import Callback, LightningModule, Trainer, strategies
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    RichProgressBar,
    SpikeDetection,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loops import fit_loop, training_epoch_loop
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors import data_connector
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _Sync,
)
from lightning.pytorch.trainer.states import RunningStage
from rich.progress import Progress
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset
from torchmetrics import MeanMetric

from optuna_hermes._lightning._callbacks import _FIELDS
from optuna_hermes._lightning._clocks import leave_out
from optuna_hermes._lightning._loops import _add, loop_state, restore_loop_state
from optuna_hermes._lightning._module_hooks import SAVE, savers, without_hook
from optuna_hermes._lightning._settings import OF_TRAINER, SETTINGS, TrainerSettings
from optuna_hermes._lightning._trainer_hooks import clean
from optuna_hermes._lightning._units import validated_names
from optuna_hermes.suspend._modules._metrics import metric_state, restore_metric
from optuna_hermes.suspend._modules._parts import parts_of
from optuna_hermes.suspend._state import plain


class Line(LightningModule):
    """Logs once in every way whose state is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.mean = MeanMetric()

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch[0]).square().mean()
        self.mean(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("sum", loss, on_step=False, on_epoch=True, reduce_fx=sum)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss

    def validation_step(
        self, batch: list[torch.Tensor], batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.log("val_loss", self.layer(batch[0]).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class At(Callback):
    """Calls a function in one hook."""

    def __init__(self, hook: str, call: Callable[[Trainer], None]) -> None:
        setattr(self, hook, lambda trainer, *args, **kwargs: call(trainer))


def data() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(24.0).reshape(6, 4)), batch_size=1)


def fit(*callbacks: Callback, validation: Any = None, **options: Any) -> Trainer:
    torch.set_num_threads(1)
    settings: dict[str, Any] = {
        "max_epochs": 2,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "callbacks": list(callbacks),
    }
    trainer = Trainer(**{**settings, **options})
    trainer.fit(Line(), data(), validation or data())
    return trainer


def test_fit_starts_with_resume_start() -> None:
    """``fit`` calls ``resume_start`` once, after ``setup``, with the path it was given."""
    names = list(inspect.signature(_CheckpointConnector.resume_start).parameters)
    assert names[:2] == ["self", "checkpoint_path"]
    assert names[2:] in ([], ["weights_only"])  # since Lightning 2.6
    calls: list[Any] = []

    def watch(trainer: Trainer) -> None:
        vars(trainer._checkpoint_connector)["resume_start"] = lambda *a, **k: calls.append((a, k))

    fit(At("setup", watch))
    assert calls == [((None,), dict.fromkeys(names[2:]))]


def test_optimizers_are_restored_after_the_hooks_of_a_fit_s_beginning() -> None:
    """``restore_training_state`` runs once, with optimizers and with groups that callbacks make."""
    seen: list[Any] = []

    def watch(trainer: Trainer) -> None:
        connector = trainer._checkpoint_connector
        restore = connector.restore_training_state

        def restore_training_state() -> None:
            seen.append([type(each) for each in trainer.optimizers])
            restore()

        vars(connector)["restore_training_state"] = restore_training_state

    fit(At("setup", watch), At("on_fit_start", lambda trainer: seen.append("fit starts")))
    assert seen == ["fit starts", [torch.optim.SGD]]
    assert "optimizer.param_groups = param_groups" in inspect.getsource(BaseFinetuning.on_fit_start)
    assert "zip(self.optimizers, optimizer_states)" in inspect.getsource(
        Strategy.load_optimizer_state_dict
    )


def test_optimizers_of_a_module_are_those_of_the_strategy() -> None:
    """What ``LightningModule.optimizers`` returns is found by its number."""
    seen: list[bool] = []

    def compare(trainer: Trainer) -> None:
        (wrapped,) = trainer.strategy._lightning_optimizers
        seen.append(trainer.lightning_module.optimizers() is wrapped)

    fit(At("on_train_start", compare))
    assert seen == [True]


def test_weights_that_a_checkpoint_must_fit() -> None:
    """They are named by the parameters and the persistent buffers of each part."""
    module = Line()
    module.register_buffer("kept", torch.zeros(1))
    module.register_buffer("unset", None)
    module.layer.register_buffer("other", torch.zeros(1), persistent=False)
    module.layer.register_parameter("none", None)
    parts = parts_of(module)
    assert parts.sizes.keys() == module.state_dict().keys()
    assert parts.sizes.keys() == {"kept", "layer.weight", "layer.bias"}
    assert parts.unset == {"unset"}


def test_a_loaded_checkpoint_is_restored() -> None:
    """The loops are restored from what ``resume_start`` leaves in the connector."""
    trainer = fit()
    checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    assert {"callbacks", "loops", "optimizer_states", "lr_schedulers", "state_dict"} <= set(
        checkpoint
    )

    def resume(trainer: Trainer) -> None:
        connector = trainer._checkpoint_connector

        def resume_start(*args: Any, **kwargs: Any) -> None:
            connector._ckpt_path = "somewhere"
            connector._loaded_checkpoint = checkpoint

        vars(connector)["resume_start"] = resume_start

    steps: list[int] = []
    watch = At("on_train_batch_end", lambda trainer: steps.append(trainer.global_step))
    fit(At("setup", resume), watch, max_epochs=3)
    assert steps == [13, 14, 15, 16, 17, 18]


def test_a_hook_is_left_out() -> None:
    """Lightning calls what objects have in its place, and they have their hooks again then."""
    calls: list[Any] = []

    class Saves(Line):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            calls.append(checkpoint)

    module = Saves()
    callback = LambdaCallback(on_save_checkpoint=lambda *args: calls.append(args[2]))
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False}
    trainer = Trainer(accelerator="cpu", callbacks=[callback, Callback()], **options)
    trainer.strategy.connect(module)
    assert savers(trainer) == [module, callback]
    before = dict(vars(module)), dict(vars(callback))
    for number, hooks in enumerate((savers(trainer), [])):
        with without_hook(hooks, SAVE):
            call._call_lightning_module_hook(trainer, SAVE, {})
            call._call_callbacks_on_save_checkpoint(trainer, {})
        assert (vars(module), vars(callback)) == before
        assert calls == [{}, {}] * number


def test_loaders_are_asked_of_their_source() -> None:
    """Both loops ask an object that says whether hooks make them, by a method of that object."""
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    for loop in (trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop):
        source = loop._data_source
        assert isinstance(vars(source), dict)
        assert not source.is_module()
        vars(source)["dataloader"] = lambda: [1]
        assert data_connector._request_dataloader(source) == [1]


def test_settings_of_a_trainer() -> None:
    """They are attributes of the trainer and its loops, and Lightning reads its limits there."""
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, max_epochs=1)
    own = {name for name in SETTINGS if "." not in name}
    assert own <= set(vars(trainer))
    settings = TrainerSettings(trainer)
    settings.begin()
    assert settings.changed() == {}
    settings.restored = dict.fromkeys(SETTINGS, 7)
    settings.restore()
    assert settings.changed() == settings.restored
    limits = trainer.max_epochs, trainer.min_epochs, trainer.max_steps, trainer.min_steps
    assert limits == (7, 7, 7, 7)
    source = inspect.getsource(_CheckpointConnector.restore_loops)
    assert "self.trainer.current_epoch > self.trainer.max_epochs" in source


def test_plain_values_of_a_trainer() -> None:
    """They have these names: one of another name is a user's, and comes back with its trial."""
    own = {name for name, value in vars(fit()).items() if plain(value)}
    assert {name for name in own if not name.startswith("_")} <= OF_TRAINER


def test_spike_detection_does_not_load_what_it_saves() -> None:
    """Should it do so one day, its state need not be left out of checkpoints."""
    spikes = SpikeDetection()
    with pytest.raises(AttributeError, match="running"):
        spikes.load_state_dict(spikes.state_dict())


def test_hook_before_each_fetch() -> None:
    """``_on_before_fetch`` runs once a batch, with all of the last batch counted and logged."""
    seen: list[tuple[int, int, bool]] = []

    def watch(trainer: Trainer) -> None:
        loop = trainer.fit_loop.epoch_loop
        original = loop._on_before_fetch

        def before_fetch() -> None:
            current = loop.batch_progress.current
            assert current.ready == current.completed == current.processed
            seen.append((current.ready, loop._batches_that_stepped, clean(trainer)))
            original()

        vars(loop)["_on_before_fetch"] = before_fetch

    fit(At("on_train_start", watch), accumulate_grad_batches=2)
    assert [ready for ready, *_ in seen] == [0, 1, 2, 3, 4, 5] * 2
    assert [stepped for _, stepped, _ in seen] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert [clean for *_, clean in seen] == [True, False] * 6


def test_hook_between_loaders_and_their_iterators() -> None:
    """``_load_combined_loader_states`` runs with the loaders made and nothing drawn from them."""
    seen: list[tuple[int, bool]] = []

    def watch(trainer: Trainer) -> None:
        loop = trainer.fit_loop

        def load_states() -> None:
            assert loop._combined_loader is not None
            seen.append((len(loop._combined_loader.flattened), loop._data_fetcher is None))

        vars(loop)["_load_combined_loader_states"] = load_states

    fit(At("setup", watch))
    assert seen == [(1, True)]


def test_the_epoch_is_set_in_samplers() -> None:
    """One function sets it, once each, in that of a loader and in that of its batch sampler."""
    seen: list[int] = []

    class Epochs(SequentialSampler):
        def set_epoch(self, epoch: int) -> None:
            seen.append(epoch)

    points = range(4)
    fit_loop._set_sampler_epoch(DataLoader(points, sampler=Epochs(points)), 3)
    batches = BatchSampler(Epochs(points), 2, drop_last=False)
    fit_loop._set_sampler_epoch(DataLoader(points, batch_sampler=batches), 4)
    assert seen == [3, 4]


def test_iterators_over_training_loaders() -> None:
    """They are made with the loaders, where an epoch's batches begin, and within a fetch."""
    made = inspect.getsource(_FitLoop.setup_data)
    assert made.index("._load_combined_loader_states()") < made.index("iter(self._data_fetcher)")
    begun = inspect.getsource(_TrainingEpochLoop.on_run_start)
    assert "iter(data_fetcher)" in begun
    assert "_stop_profiler = self._on_after_fetch" in begun


def test_weights_are_loaded_before_the_hooks_of_a_fit_s_beginning() -> None:
    """By the time that ``restore_callbacks`` returns."""
    source = inspect.getsource(_CheckpointConnector._restore_modules_and_callbacks)
    assert source.index("self.restore_model()") < source.index("self.restore_callbacks()")
    run = inspect.getsource(Trainer._run)
    assert run.index("._restore_modules_and_callbacks(") < run.index('"on_fit_start"')


def test_restart_stage() -> None:
    """The stage that skips a validation is read by the epoch loop; before 2.5 it only restarts."""
    source = inspect.getsource(_TrainingEpochLoop)
    stages = getattr(training_epoch_loop, "RestartStage", None)
    if stages is not None:
        assert stages.NONE == "none"
        assert "self._restart_stage" in source
        assert "if self.restarted_on_last" in source
    else:
        assert "if self.restarting and self._should_check_val_fx(data_fetcher):" in source
        assert "self.reset()\n        self.on_run_start(data_fetcher)\n" in source
        begin = inspect.getsource(_FitLoop.on_advance_start)
        assert begin.count("increment_ready") == begin.count("increment_started") == 1


def test_hooks_of_the_beginning() -> None:
    """The sanity check, and the beginning of an epoch, are methods that a fit calls by name."""
    assert "self._run_sanity_check()" in inspect.getsource(Trainer._run_stage)
    assert "self.on_advance_start()" in inspect.getsource(_FitLoop.run)
    assert "on_train_epoch_start" in inspect.getsource(_FitLoop.on_advance_start)
    assert "on_train_start" in inspect.getsource(_FitLoop.on_run_start)
    begin = inspect.getsource(_TrainingEpochLoop.run)
    assert "self.reset()" in begin
    assert begin.index("self.reset()") < begin.index("self.on_run_start(data_fetcher)")


def test_names_of_a_validation() -> None:
    """At the end of a validation its own metrics are known, and those of training are not."""
    names: list[set[str]] = []
    watch = At("on_validation_end", lambda trainer: names.append(validated_names(trainer)))
    fit(watch, num_sanity_val_steps=0)
    assert names == [{"val_loss"}] * 2
    names.clear()
    fit(watch, num_sanity_val_steps=0, validation=[data(), data()])
    assert names[0] == {"val_loss", "val_loss/dataloader_idx_0", "val_loss/dataloader_idx_1"} - {
        "val_loss"
    }


def test_loop_state_there_and_back() -> None:
    """The loop's state fits into a checkpoint, and restoring it gives the same state again."""
    states: list[dict[str, Any]] = []

    def there_and_back(trainer: Trainer) -> None:
        before = loop_state(trainer)
        assert plain(before)
        copy = {
            key: value.copy() if isinstance(value, dict) else value for key, value in before.items()
        }
        trainer.fit_loop.epoch_loop._results.clear()
        trainer._logger_connector._callback_metrics = {}
        restore_loop_state(trainer, copy)
        after = loop_state(trainer)
        assert str({**after, "clocks": None}) == str({**before, "clocks": None})
        states.append(before)

    trainer = fit(At("on_train_batch_start", there_and_back))
    assert [result["key"] for result in states[-1]["results"]] == [
        "training_step.loss",
        "training_step.sum",
        "training_step.mean",
    ]
    assert trainer.callback_metrics["mean"].item() == pytest.approx(
        trainer.callback_metrics["loss_epoch"].item()
    )


def test_fields_of_a_logged_value() -> None:
    """The description of a logged value has no parts that would be forgotten."""
    assert [field.name for field in dataclasses.fields(_Metadata)] == [
        "fx",
        "name",
        "prog_bar",
        "logger",
        "on_step",
        "on_epoch",
        "reduce_fx",
        "enable_graph",
        "add_dataloader_idx",
        "dataloader_idx",
        "metric_attribute",
        "_sync",
    ]
    assert [field.name for field in dataclasses.fields(_Sync)] == [
        "fn",
        "_should",
        "rank_zero_only",
        "_op",
        "_group",
    ]


def test_state_of_a_metric() -> None:
    """A metric's value is its states and its number of updates."""
    metric, other = MeanMetric(), MeanMetric()
    metric.update(torch.tensor(3.0))
    restore_metric(other, metric_state(metric))
    assert other.update_count == 1
    assert other.compute() == 3.0


def test_time_is_left_out() -> None:
    """Seconds that were not spent on training do not count in anything that counts time."""
    timer, saves = Timer(), ModelCheckpoint(save_top_k=0)
    throughput, profiler = ThroughputMonitor(lambda batch: 1), SimpleProfiler()
    done: list[bool] = []

    def look(trainer: Trainer) -> None:
        if done:
            return
        done.append(True)
        trainer._last_val_time = saves._last_time_checked = 0.0
        began, started = dict(throughput._t0s), dict(profiler.current_actions)
        whole = profiler.start_time
        leave_out(trainer, 1000.0)
        assert trainer._last_val_time == saves._last_time_checked == 1000.0
        assert timer.time_elapsed() < -900
        timer._start_time[RunningStage.TRAINING] -= 1000.0  # type: ignore[operator]
        assert throughput._t0s == {stage: began[stage] + 1000.0 for stage in began} != {}
        actions = {name: started[name] + 1000.0 for name in started}
        assert profiler.current_actions == actions
        assert "run_training_epoch" in actions
        assert profiler.start_time == whole + 1000.0
        throughput._t0s.update(began)

    fit(
        timer,
        saves,
        throughput,
        At("on_train_batch_start", look),
        profiler=profiler,
        enable_checkpointing=True,
    )
    assert done


def test_clocks_are_read() -> None:
    """The moments that are moved are those from which time is counted."""
    source = inspect.getsource(_TrainingEpochLoop._should_check_val_fx)
    if "_val_check_time_interval" in source:  # since Lightning 2.6
        assert "self.trainer._last_val_time >= interval" in source
    assert "prev_time_check = self._last_time_checked" in inspect.getsource(ModelCheckpoint)
    assert "end - start + offset" in inspect.getsource(Timer.time_elapsed)
    assert set(Timer()._start_time) == set(Timer()._end_time) == set(RunningStage)
    assert list(vars(Throughput()))[3:] == ["_time", "_batches", "_samples", "_lengths", "_flops"]


def test_bar_of_tqdm() -> None:
    """A bar has a text, a position and two moments; one that is shown nowhere has none."""
    bar = TQDMProgressBar()
    assert bar._train_progress_bar is bar._val_progress_bar is None
    with io.StringIO() as nowhere:
        line = Tqdm(total=10, file=nowhere)
        line.set_description("Epoch 1")
        assert {"start_t", "last_print_t", "desc", "n", "initial"} <= set(vars(line))
        assert line.desc == "Epoch 1: "
        line.close()
    assert line.disable


def test_bar_of_rich() -> None:
    """A bar is a task with a text, a beginning, and samples from which its speed is taken."""
    bar = RichProgressBar()
    assert bar.progress is bar.train_progress_bar_id is None
    progress = Progress()
    progress.add_task("Epoch 1", total=10)
    task = progress.tasks[0]
    progress.update(task.id, completed=1)
    progress.update(task.id, completed=2)
    assert task.start_time is not None
    assert [sample._fields for sample in task._progress] == [("timestamp", "completed")] * 2
    assert task._progress.maxlen is not None


def test_state_that_callbacks_do_not_save() -> None:
    """State saved for Lightning's callbacks is there, and they do not save it themselves."""
    for callback in (LearningRateMonitor(), ModelCheckpoint(), StochasticWeightAveraging(0.1)):
        names = next(names for kind, names in _FIELDS.items() if isinstance(callback, kind))
        unset = {"lrs", "last_momentum_values", "last_weight_decay_values"}
        later = {"_defer_save_until_validation"}  # since Lightning 2.6
        assert set(names) <= set(vars(callback)) | unset | later
        assert names[0] not in callback.state_dict()
    source = inspect.getsource(LearningRateMonitor)
    names = next(names for kind, names in _FIELDS.items() if issubclass(LearningRateMonitor, kind))
    assert all(f"self.{name} = " in source for name in names)
    assert "current_score" not in inspect.getsource(ModelCheckpoint.load_state_dict)
    assert "self._initialized = True" in inspect.getsource(
        StochasticWeightAveraging.on_train_epoch_start
    )


def test_schedulers_at_the_end_of_an_epoch() -> None:
    """A fit that was resumed leaves out the schedulers that look at metrics, once."""
    source = inspect.getsource(_FitLoop.on_advance_end)
    assert "self.epoch_loop._num_ready_batches_reached()" in source
    assert "not self.restarting" in source
    assert isinstance(_FitLoop._skip_backward, property)


def test_loggers_begin_before_setup(tmp_path: Path) -> None:
    """Experiments are there when ``setup`` is called, and the profiler knows the first folder."""
    seen: list[Any] = []

    def look(trainer: Trainer) -> None:
        profiler = trainer.profiler  # type: ignore[attr-defined]
        begun = trainer.loggers[0]._experiment  # type: ignore[attr-defined]
        seen.append((begun is not None, profiler.dirpath == trainer.log_dir))

    fit(At("setup", look), logger=CSVLogger(tmp_path), profiler=SimpleProfiler())
    assert seen == [(True, True)]


def test_parts_of_a_csv_logger(tmp_path: Path) -> None:
    """Its place is in four attributes, and its writer has columns, rows and a file."""
    logger = CSVLogger(tmp_path)
    assert {"_root_dir", "_save_dir", "_name", "_version"} <= set(vars(logger))
    writer: Any = logger.experiment
    assert logger._experiment is writer
    assert writer.log_dir == logger.log_dir
    logger.log_metrics({"b": 1.0}, 0)
    assert writer.metrics == [{"b": 1.0, "step": 0}]
    logger.save()
    assert (writer.metrics, writer.metrics_keys) == ([], ["b", "step"])
    assert Path(writer.metrics_file_path) == Path(logger.log_dir, writer.NAME_METRICS_FILE)
    logger.log_metrics({"a": 2.0}, 1)
    logger.save()
    lines = Path(writer.metrics_file_path).read_bytes().split(b"\r\n")
    assert lines == [b"a,b,step", b",1.0,0", b"2.0,,1", b""]


def test_parts_of_a_tensorboard_logger(tmp_path: Path) -> None:
    """Its writers know their files, and whoever was closed opens a new one with a given end."""
    pytest.importorskip("tensorboard")
    logger = TensorBoardLogger(tmp_path)
    assert {"_root_dir", "_name", "_version", "_sub_dir", "_kwargs"} <= set(vars(logger))
    writer: Any = logger.experiment
    logger.log_metrics({"a": 1.0}, 0)
    (file,) = (Path(each.event_writer._file_name) for each in writer.all_writers.values())
    assert file.parent == Path(logger.log_dir)
    assert file.name.startswith("events.out.tfevents.")
    writer.filename_suffix = ".end"
    writer.close()
    assert writer.all_writers is None
    size = file.stat().st_size
    logger.log_metrics({"a": 2.0}, 1)
    logger.save()
    assert file.stat().st_size == size
    assert len(list(file.parent.glob("*.end"))) == 1
    writer.close()


def test_default_root() -> None:
    """A Trainer that was given no root directory has the working directory."""
    trainer = Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    assert vars(trainer)["_default_root_dir"] == os.getcwd()
    vars(trainer)["_default_root_dir"] = "/elsewhere"
    assert trainer.default_root_dir == "/elsewhere"


def test_sigterm() -> None:
    """An attribute that a handler sets says that the process was told to end."""
    trainer = fit()
    assert not trainer.received_sigterm
    trainer._signal_connector.received_sigterm = True
    assert trainer.received_sigterm


def test_checkpoint_folder_is_public_state() -> None:
    """``ModelCheckpoint`` saves its folder and compares it when it is loaded."""
    assert "dirpath" in ModelCheckpoint().state_dict()
    assert 'state_dict["dirpath"]' in inspect.getsource(ModelCheckpoint.load_state_dict) or (
        'state_dict.get("dirpath"' in inspect.getsource(ModelCheckpoint.load_state_dict)
    )


def test_sharded_strategies_load_checkpoints_themselves() -> None:
    """They, and no others, say that they do so once the model is set up."""
    late = {
        kind
        for kind in vars(strategies).values()
        if isinstance(kind, type) and issubclass(kind, Strategy)
        if "restore_checkpoint_after_setup" in vars(kind) and kind is not Strategy
    }
    assert {each.__name__ for each in late} == {
        "DeepSpeedStrategy",
        "FSDPStrategy",
        "ModelParallelStrategy",
    }


def test_an_epoch_gets_another_length() -> None:
    """A loader that is taken anew in the hook before a fetch counts, and so does its length."""
    seen: list[tuple[bool, float]] = []

    def shorten(trainer: Trainer) -> None:
        loop = trainer.fit_loop
        fetcher, combined = loop._data_fetcher, loop._combined_loader
        assert fetcher is not None
        assert combined is not None
        fetch = loop.epoch_loop._on_before_fetch

        def before_fetch() -> None:
            if loop.epoch_loop.batch_progress.current.ready == 2:
                combined.limits = None
                combined.reset()
                combined.flattened = [DataLoader(combined.flattened[0].dataset, batch_size=2)]
                iter(fetcher)
                fetcher.fetched += 2
                loop.max_batches = trainer.val_check_batch = 3
            fetch()

        vars(loop.epoch_loop)["_on_before_fetch"] = before_fetch

    def look(trainer: Trainer) -> None:
        seen.append((trainer.is_last_batch, trainer.num_training_batches))

    trainer = fit(At("on_train_start", shorten), At("on_train_batch_end", look), max_epochs=1)
    assert seen == [(False, 6), (False, 6), (True, 3)]
    assert trainer.fit_loop.epoch_loop.val_loop._has_run


def test_schedulers_are_stepped_by_a_function_of_the_loop() -> None:
    """It is called once after each batch with an interval, by these names."""
    parameters = inspect.signature(_TrainingEpochLoop.update_lr_schedulers).parameters
    assert list(parameters) == ["self", "interval", "update_plateau_schedulers"]
    source = inspect.getsource(_TrainingEpochLoop.advance)
    assert source.count('self.update_lr_schedulers("step", update_plateau_schedulers=False)') == 1
    assert "self.batch_progress.increment_ready()" in source.split("update_lr_schedulers")[0]
    counted = inspect.getsource(_TrainingEpochLoop._accumulated_batches_reached)
    assert "current.ready % self.trainer.accumulate_grad_batches == 0" in counted


def test_a_training_loader_is_prepared_by_a_function_of_the_connector() -> None:
    """The loader it returns is trained with; validation loaders pass there too, in another mode."""
    modes: list[RunningStage] = []

    def stand_between(trainer: Trainer) -> None:
        connector = trainer._data_connector
        prepare = connector._prepare_dataloader

        def between(loader: Any, shuffle: bool, mode: RunningStage) -> object:
            modes.append(mode)
            if mode == RunningStage.TRAINING:
                return DataLoader(loader.dataset, batch_size=1)
            return prepare(loader, shuffle=shuffle, mode=mode)

        vars(connector)["_prepare_dataloader"] = between

    trainer = fit(At("setup", stand_between), max_epochs=1)
    assert set(modes) == {RunningStage.TRAINING, RunningStage.VALIDATING}
    assert trainer.train_dataloader is not None
    assert trainer.train_dataloader.batch_size == 1


def test_a_metric_may_synchronise_otherwise_from_now_on() -> None:
    """A metric logged otherwise before is refused, unless it is told; then it counts on."""
    results = _ResultCollection(training=True)
    said: dict[str, Any] = {"on_step": False, "on_epoch": True, "batch_size": 2}
    results.log("training_step", "loss", torch.tensor(1.0), **said)
    with pytest.raises(MisconfigurationException, match="different arguments"):
        results.log("training_step", "loss", torch.tensor(3.0), sync_dist=True, **said)
    results["training_step.loss"].meta.sync.should = True
    results.log("training_step", "loss", torch.tensor(3.0), sync_dist=True, **said)
    assert results["training_step.loss"].compute() == 2.0


def test_what_another_metric_has_counted_can_be_added() -> None:
    """Means and what Lightning logs are weighted as if one metric had seen all."""
    first, second = MeanMetric(), MeanMetric()
    first.update(torch.tensor([1.0, 1.0, 1.0]))
    second.update(torch.tensor([5.0]))
    _add(first, metric_state(second))
    assert first.compute() == 2.0
    results = [_ResultCollection(training=True) for _ in range(2)]
    for value, size, each in ((1.0, 3, results[0]), (5.0, 1, results[1])):
        options: dict[str, Any] = {"on_step": False, "on_epoch": True, "batch_size": size}
        each.log("training_step", "loss", torch.tensor(value), **options)
        each.log("training_step", "most", torch.tensor(value), reduce_fx="max", **options)
    for key in ("training_step.loss", "training_step.most"):
        _add(results[0][key], metric_state(results[1][key]))
    assert results[0]["training_step.loss"].compute() == 2.0
    assert results[0]["training_step.most"].compute() == 5.0
