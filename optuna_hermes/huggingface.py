"""Suspend and resume a Hugging Face ``Trainer`` between any two steps of its optimizer."""

from __future__ import annotations

from typing import Any

from optuna_hermes._extras import extra
from optuna_hermes.errors import InvalidInputError, MonitorError
from optuna_hermes.model import Checkpoint
from optuna_hermes.suspend import Session, read

with extra("huggingface"):
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_utils import TrainOutput

    from optuna_hermes._huggingface import Fetch, HuggingFaceLoop, own_batches, position
    from optuna_hermes.cooperative import session_of


class HermesCallback(TrainerCallback):
    """Reports a trial after each evaluation, and lets other trials have its device between steps.

    Under ``optuna_hermes.optimize`` the trial is suspended when its slice is over and resumed later
    with the same losses and weights as if nothing had happened, in this process or in another one.
    Under plain Optuna the callback reports to the trial and asks the study's pruner.

    Args:
        trial: the ``optuna.Trial`` that trains; None for a training of no study.
        monitor: name of a logged value: of an evaluation (``eval_loss``, ``eval_accuracy``), or of
            training (``loss``). Each time that it is logged is one unit of the trial.

    Raises:
        InvalidInputError: in training, if the Trainer cannot be suspended, or started itself.
        MonitorError: after training, when the value was never logged.

    Example:
        ```python
        def objective(trial):
            lr = trial.suggest_float("lr", 1e-5, 1e-3, log=True)
            args = TrainingArguments(f"out/{trial.number}", learning_rate=lr,
                                     eval_strategy="epoch", save_strategy="no")
            hermes = HermesCallback(trial, monitor="eval_loss")
            trainer = Trainer(model, args, train_dataset=train, eval_dataset=valid,
                              callbacks=[hermes])
            hermes.train(trainer)  # instead of trainer.train()
            return hermes.value
        ```
    """

    def __init__(
        self, trial: Any, monitor: str = "eval_loss", *, _session: Session | None = None
    ) -> None:
        self._trial = trial
        self._monitor = monitor
        self._session = _session
        self._trainer: Trainer | None = None
        self._loop: HuggingFaceLoop | None = None
        self._found: tuple[Checkpoint, Any] | None = None
        self._names: set[str] = set()

    @property
    def value(self) -> float | None:
        """The value reported last."""
        return None if self._loop is None else self._loop.value

    def train(self, trainer: Trainer) -> TrainOutput:
        """Train as ``trainer.train()`` does, from the trial's present step.

        Args:
            trainer: made for this trial, with this callback or without.

        Raises:
            InvalidInputError: it trains in several processes, or searches its batch size.
            Suspended: the trial is on disk.
            CheckpointError: the trial cannot be stored, or cannot be resumed.
        """
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        session = self._session = self._session or session_of(self._trial)
        _refuse(trainer, session)
        self._trainer = trainer
        found = None
        if session is not None:
            trial = f"trial {getattr(self._trial, 'number', '?')}"
            found = self._found = read(
                session.checkpoints, trial, session.checkpoint_dir, session.checkpoint_url
            )
        try:
            with own_batches(trainer, self._next_step), position(trainer, found) as checkpoint:
                return trainer.train(resume_from_checkpoint=checkpoint)
        finally:
            self._trainer = None
            if self._loop is not None:
                self._loop.leave()

    # -- the trainer's events ------------------------------------------------------------------

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Resume the trial, now that the trainer has its optimizer."""
        if self._trainer is None:
            raise InvalidInputError(
                "HermesCallback must start the training itself, but trainer.train() was called: "
                "call hermes.train(trainer) instead."
            )
        self._loop = HuggingFaceLoop(
            self._trial, self._trainer, self._session, self._found, self._monitor
        )
        self._found = None

    def on_log(self, *args: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """Report a unit, if the monitored value is logged."""
        loop = self._loop
        if self._trainer is None or loop is None or not loop.begun:
            return
        self._names |= set(logs or {})
        if logs is not None and self._monitor in logs:
            loop.report(logs[self._monitor])

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        """Report progress within a long evaluation, or prediction after the training."""
        if self._loop is not None:
            self._loop.beat()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Check that the monitored value was logged."""
        if self.value is None:
            names = ", ".join(sorted(self._names)) or "none"
            raise MonitorError(
                f"HermesCallback(monitor={self._monitor!r}) needs a value of this name in the "
                f"logs, but there are: {names}. Is eval_strategy set?"
            )

    def _next_step(self, fetch: Fetch, iterator: Any, number: int, device: Any) -> Any:
        assert self._loop is not None
        return self._loop.next_step(fetch, iterator, number, device)


def _refuse(trainer: Trainer, session: Session | None) -> None:
    if session is None:
        return
    several = trainer.args.world_size > 1 or trainer.args.n_gpu > 1
    if several or trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise InvalidInputError(
            "HermesCallback must train in one process on one device, but the Trainer uses several: "
            "leave torchrun, DeepSpeed and FSDP out; a trial has one device here."
        )
    if trainer.args.auto_find_batch_size:
        raise InvalidInputError(
            "HermesCallback must know the batch size, but auto_find_batch_size is set: leave it "
            "out."
        )
