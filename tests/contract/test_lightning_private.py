"""Each piece of Lightning that is not promised is still what ``_lightning.py`` takes it for.

If a test here fails after an upgrade, Lightning has changed that piece: look at ``_lightning.py``
before anything else.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from lightning.pytorch.loops.training_epoch_loop import RestartStage, _TrainingEpochLoop
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _Sync
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from optuna_hermes import _lightning as private


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
    assert list(inspect.signature(_CheckpointConnector.resume_start).parameters) == [
        "self",
        "checkpoint_path",
        "weights_only",
    ]
    calls: list[Any] = []

    def watch(trainer: Trainer) -> None:
        vars(trainer._checkpoint_connector)["resume_start"] = lambda *a, **k: calls.append((a, k))

    fit(At("setup", watch))
    assert calls == [((None,), {"weights_only": None})]


def test_a_loaded_checkpoint_is_restored() -> None:
    """What ``resume_start`` leaves in the connector is what the loops are restored from."""
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


def test_hook_before_each_fetch() -> None:
    """``_on_before_fetch`` runs once a batch, with all of the last batch counted and logged."""
    seen: list[tuple[int, int, bool]] = []

    def watch(trainer: Trainer) -> None:
        loop = trainer.fit_loop.epoch_loop
        original = loop._on_before_fetch

        def before_fetch() -> None:
            current = loop.batch_progress.current
            assert current.ready == current.completed == current.processed
            seen.append((current.ready, loop._batches_that_stepped, private.clean(trainer)))
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


def test_restart_stage() -> None:
    """The stage that skips a validation exists, and the epoch loop reads it when it restarts."""
    assert RestartStage.NONE == "none"
    source = inspect.getsource(_TrainingEpochLoop)
    assert "self._restart_stage" in source
    assert "if self.restarted_on_last" in source


def test_names_of_a_validation() -> None:
    """At the end of a validation its own metrics are known, and those of training are not."""
    names: list[set[str]] = []
    watch = At("on_validation_end", lambda trainer: names.append(private.validated_names(trainer)))
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
        before = private.loop_state(trainer)
        assert private.plain(before)
        copy = {
            key: value.copy() if isinstance(value, dict) else value for key, value in before.items()
        }
        trainer.fit_loop.epoch_loop._results.clear()
        trainer._logger_connector._callback_metrics = {}
        private.restore_loop_state(trainer, copy)
        assert str(private.loop_state(trainer)) == str(before)
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
    """How a logged value is described has no parts that would be forgotten."""
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
    private._restore_metric(other, private._metric_state(metric))
    assert other.update_count == 1
    assert other.compute() == 3.0


def test_time_is_left_out() -> None:
    """Seconds that were not spent on training do not count in ``Timer`` and ``ModelCheckpoint``."""
    timer, saves = Timer(), ModelCheckpoint(save_top_k=0)

    def leave_out(trainer: Trainer) -> None:
        trainer._val_check_time_interval = 1e9
        trainer._last_val_time = 0.0
        saves._last_time_checked = 0.0
        private.leave_out(trainer, 1000.0)
        assert trainer._last_val_time == saves._last_time_checked == 1000.0
        assert timer.time_elapsed() < -900

    fit(timer, saves, At("on_fit_end", leave_out), enable_checkpointing=True)


def test_checkpoint_folder_is_public_state() -> None:
    """``ModelCheckpoint`` saves its folder and compares it when it is loaded."""
    assert "dirpath" in ModelCheckpoint().state_dict()
    assert 'state_dict["dirpath"]' in inspect.getsource(ModelCheckpoint.load_state_dict) or (
        'state_dict.get("dirpath"' in inspect.getsource(ModelCheckpoint.load_state_dict)
    )
