"""A suspended Hugging Face training is, bit for bit, the training that was never suspended."""

from __future__ import annotations

import functools
import json
import random
import runpy
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import torch
import tqdm
from torch.utils.data import Dataset, IterableDataset

from optuna_hermes.errors import CheckpointError, InvalidInputError, MonitorError, Suspended
from optuna_hermes.model import TierName
from optuna_hermes.suspend._loaders._sampler import ResumableSampler
from optuna_hermes.testing import FakeSession

transformers = pytest.importorskip("transformers")

from optuna_hermes.huggingface import HermesCallback  # noqa: E402

EPOCHS, BATCHES = 3, 5
TIMES = ("runtime", "per_second", "total_flos")


class Texts(Dataset[dict[str, torch.Tensor]]):
    """Made-up sentences, of which a few words are masked anew whenever they are read."""

    def __init__(self, count: int = BATCHES * 8, masked: float = 0.2) -> None:
        generator = torch.Generator().manual_seed(7)
        self._ids = torch.randint(2, 32, (count, 6), generator=generator)
        self._masked = masked

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        hidden = torch.rand(6) + 0.01 * random.random() + 0.01 * np.random.rand() < self._masked
        label = (self._ids[index] > 16).sum() > 3
        return {"input_ids": self._ids[index].masked_fill(hidden, 1), "labels": label.long()}


class Stream(IterableDataset[Any]):
    """The same, one after the other."""

    def __iter__(self) -> Any:
        data = Texts()
        return (data[index] for index in range(len(data)))

    def __len__(self) -> int:
        return BATCHES * 8


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    # The last step of an epoch has fewer batches; the order is drawn from everybody's generator.
    "accumulated": {
        "gradient_accumulation_steps": 2,
        "accelerator_config": {"use_seedable_sampler": False},
    },
    "by-steps": {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "logging_steps": 3,
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "metric_for_best_model": "eval_loss",
        "save_strategy": "steps",
        "save_steps": 2,
        "save_total_limit": 1,
        "load_best_model_at_end": True,
    },
    # The seed of the processes that read the evaluation's data is drawn once only.
    "workers": {"dataloader_num_workers": 2, "dataloader_persistent_workers": True},
}


class Ticks(transformers.TrainerCallback):
    """Tells a session of each step."""

    def __init__(self, session: FakeSession | None) -> None:
        self._session = session

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        if self._session is not None:
            self._session.tick()


class Weighing(transformers.Trainer):
    """Its losses depend on how many there were."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.losses = getattr(self, "losses", 0) + 1
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        return loss if isinstance(loss, tuple) else loss / (1 + 0.1 * self.losses)


class Mixing:
    """A collator that turns each second batch around."""

    def __init__(self) -> None:
        self.batches = 0

    def __call__(self, features: list[Any]) -> Any:
        self.batches += 1
        batch = transformers.default_data_collator(features)
        if self.batches % 2:
            batch["input_ids"] = batch["input_ids"].flip(0)
        return batch


class Decaying(transformers.TrainerCallback):
    """Changes settings by numbers of its own, beside what no next process needs of it."""

    def __init__(self) -> None:
        self.seen: list[float] = []
        self.decay = 0.0
        self.bar: Any = None

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        self.began, self.model, self.state, self.args = time.time(), model, state, args
        self.shown = tqdm.tqdm(disable=True)

    def on_epoch_begin(self, args: Any, state: Any, *others: Any, **kwargs: Any) -> None:
        if state.global_step == 0:
            self.decay = 0.1

    def on_step_begin(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any
    ) -> None:
        self.optimizer = optimizer
        self.seen.append(state.epoch)
        optimizer.param_groups[0]["weight_decay"] = self.decay * len(self.seen)
        if len(self.seen) == 6:
            args.max_grad_norm = 0.01

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        if self.bar is None:
            self.bar = tqdm.tqdm(disable=True)

    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self.bar = None


class Iterating(transformers.TrainerCallback):
    """Keeps what cannot be saved."""

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.rates = (0.1 * number for number in range(100))

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        next(self.rates)


def trainer(
    folder: Path,
    case: str = "plain",
    *,
    data: Any = None,
    seed: int = 1,
    kind: Any = transformers.Trainer,
    parts: tuple[Any, ...] = (),
    collator: Any = None,
    **options: Any,
) -> Any:
    torch.manual_seed(seed)  # of the first weights: a run that comes back has others
    config = transformers.BertConfig(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=8,
    )
    given: dict[str, Any] = {"eval_strategy": "epoch", "save_strategy": "no"}
    given |= {"learning_rate": 5e-3, "num_train_epochs": EPOCHS}
    args = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=8,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **{**given, **CASES[case], **options},
    )
    patient = [transformers.EarlyStoppingCallback(50)] if case == "by-steps" else []
    return kind(
        transformers.BertForSequenceClassification(config),
        args,
        train_dataset=data or Texts(),
        eval_dataset=Texts(16),
        data_collator=None if collator is None else collator(),
        callbacks=[*patient, *(each() for each in parts)],
    )


def train(
    session: FakeSession | None,
    folder: Path,
    case: str = "plain",
    *,
    trial: Any = None,
    monitor: str = "eval_loss",
    **options: Any,
) -> tuple[HermesCallback, str]:
    """One process of a run, as a user would write it; all that it leaves, to the bit."""
    hermes = HermesCallback(trial or new_trial(), monitor, _session=session)
    made = trainer(folder, case, **options)
    made.add_callback(Ticks(session))
    torch.manual_seed(options.get("seed", 3) + 1)
    random.seed(options.get("seed", 3))
    np.random.seed(options.get("seed", 3))
    made.train_random = torch.rand(())
    output = hermes.train(made)
    history = [
        {name: value for name, value in row.items() if not name.endswith(TIMES)}
        for row in made.state.log_history
    ]
    weights = {name: part.numpy().tobytes().hex() for name, part in made.model.state_dict().items()}
    left = [history, weights, hermes.value, output.training_loss, made.state.global_step]
    return hermes, json.dumps([*left, torch.rand(()).item(), random.random(), np.random.rand()])


def new_trial(**parts: Any) -> optuna.Trial:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(**parts).ask()


@functools.cache
def expected(case: str) -> str:
    """Return the end of the run that is never suspended."""
    with tempfile.TemporaryDirectory() as folder:
        return train(FakeSession(), Path(folder), case)[1]


def suspended(session: FakeSession, folder: Path, case: str, **options: Any) -> FakeSession:
    """Train until the run is put on disk, and give the session of its next process."""
    with pytest.raises(Suspended):
        train(session, folder / "out", case, **options)
    return session.again()


def scramble() -> None:
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)


@pytest.mark.parametrize(
    "case", ["plain", "accumulated", "workers", pytest.param("by-steps", marks=pytest.mark.slow)]
)
def test_disk(case: str, tmp_path: Path) -> None:
    """Suspensions to disk in the midst of an epoch and between two leave no trace."""
    session = FakeSession({3: "disk"}, checkpoint_dir=tmp_path)
    per_epoch = 3 if case == "accumulated" else BATCHES
    session = suspended(session, tmp_path, case).again({2 * per_epoch - 3: "disk"})
    session = suspended(session, tmp_path, case, seed=2)
    assert train(session, tmp_path / "out", case, seed=4)[1] == expected(case)


@pytest.mark.parametrize("after", [(3,), (8, 2)])
def test_attributes(after: tuple[int, ...], tmp_path: Path, caplog: Any) -> None:
    """Changes of a trainer's class, its callbacks, collator and arguments come back."""
    own = {"kind": Weighing, "parts": (Decaying,), "collator": Mixing}
    left = train(FakeSession(), tmp_path / "out", **own)[1]
    assert left != expected("plain")
    session = FakeSession(checkpoint_dir=tmp_path)
    session = suspended(session.again({after[0]: "disk"}), tmp_path, "plain", **own)
    for each in after[1:]:
        session = suspended(session.again({each: "disk"}), tmp_path, "plain", seed=2, **own)
    assert train(session, tmp_path / "out", seed=4, **own)[1] == left
    assert not [each for each in caplog.records if each.name.startswith("optuna_hermes")]


_noise, _rates = np.random.default_rng(21), random.Random(22)
_scores = torch.Generator().manual_seed(23)


class Drawing(transformers.Trainer):
    """Draws from a generator of its class, and from one of this module."""

    drawn = random.Random(24)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        factor = 1 + 0.1 * self.drawn.random() + 0.1 * _noise.random()
        return (factor * loss[0], *loss[1:]) if isinstance(loss, tuple) else factor * loss


class Decays(transformers.TrainerCallback):
    """Draws by a function."""

    def on_step_begin(self, *args: Any, optimizer: Any = None, **kwargs: Any) -> None:
        optimizer.param_groups[0]["weight_decay"] = rate()


def rate() -> float:
    return _rates.random()


def score(prediction: Any) -> dict[str, float]:
    return {"score": torch.rand((), generator=_scores).item()}


class Noisy(Texts):
    """Masks by a generator of its own."""

    def __init__(self, count: int) -> None:
        super().__init__(count, masked=0.0)
        self._rng = np.random.default_rng(25)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        item = super().__getitem__(index)
        hidden = torch.from_numpy(self._rng.random(6) < 0.5)
        return {**item, "input_ids": item["input_ids"].masked_fill(hidden, 1)}


def drawing(*args: Any, **options: Any) -> Drawing:
    """One with generators as a new process has them."""
    _noise.bit_generator.state = np.random.default_rng(21).bit_generator.state
    for each, seed in ((_rates, 22), (Drawing.drawn, 24)):
        each.seed(seed)
    _scores.manual_seed(23)
    return Drawing(*args, compute_metrics=score, **{**options, "eval_dataset": Noisy(16)})


@pytest.mark.parametrize("after", [(3,), (8, 2)])
def test_generators_of_the_training_s_code(after: tuple[int, ...], tmp_path: Path) -> None:
    """Those of classes, functions and evaluation's data go on, too."""
    own = {"kind": drawing, "parts": (Decays,)}
    left = train(FakeSession(), tmp_path / "out", **own)[1]
    session = FakeSession(checkpoint_dir=tmp_path)
    session = suspended(session.again({after[0]: "disk"}), tmp_path, "plain", **own)
    for each in after[1:]:
        session = suspended(session.again({each: "disk"}), tmp_path, "plain", seed=2, **own)
    assert train(session, tmp_path / "out", seed=4, **own)[1] == left


def test_what_a_callback_cannot_save_is_named(tmp_path: Path, caplog: Any) -> None:
    """It comes back as it was in the beginning: the log says so."""
    session = FakeSession({3: "disk"}, checkpoint_dir=tmp_path)
    suspended(session, tmp_path, "plain", parts=(Iterating,))
    assert "Trial 0 changes Iterating.rates while it trains" in caplog.text


@pytest.mark.parametrize("tier", ["resident", "host"])
def test_memory(tier: TierName, tmp_path: Path) -> None:
    """A run that waits in its process while others use the random numbers goes on as it was."""
    session = FakeSession({2: tier, 5: tier}, checkpoint_dir=tmp_path, while_parked=scramble)
    assert train(session, tmp_path / "out")[1] == expected("plain")
    assert session.parks == [tier] * 2


def test_without_a_broker(tmp_path: Path) -> None:
    """Under plain Optuna the training is the same, and every evaluation is reported."""
    trial = new_trial()
    hermes, left = train(None, tmp_path, trial=trial)
    assert left == expected("plain")
    values = trial.study.trials[0].intermediate_values
    assert sorted(values) == [1, 2, 3]
    assert hermes.value == values[3]


@pytest.mark.parametrize("case", ["plain", "workers"])
def test_loaders_of_a_trial_without_checkpoints_have_no_hooks(case: str, tmp_path: Path) -> None:
    """Threads of a plain study would replace one function of torch, each for its own trial."""
    hooked = []

    class Watch(transformers.TrainerCallback):
        def on_step_end(self, *args: Any, train_dataloader: Any = None, **kwargs: Any) -> None:
            inner = train_dataloader.base_dataloader
            sampler = type(inner.batch_sampler)
            hooked.append(sampler is ResumableSampler or "_get_iterator" in vars(inner))

    train(FakeSession(), tmp_path, case, parts=(Watch,))
    assert hooked == [False] * EPOCHS * BATCHES
    with pytest.raises(Suspended):
        train(FakeSession({1: "disk"}, checkpoint_dir=tmp_path), tmp_path, case, parts=(Watch,))
    assert hooked[-1]


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set")
def test_example(tmp_path: Path, monkeypatch: Any) -> None:
    """The model that the example tunes trains for an epoch."""
    monkeypatch.chdir(tmp_path)
    example = Path(__file__).parents[2] / "examples" / "huggingface_trainer.py"
    params = {"log_width": 4, "layers": 1, "learning_rate": 1e-2, "weight_decay": 0.01}
    trial = optuna.trial.FixedTrial(params)
    torch.manual_seed(0)
    assert runpy.run_path(str(example))["objective"](trial, epochs=1) < 2.4


def test_reports(tmp_path: Path) -> None:
    """A unit is reported once, whoever trained it, with how many are left."""
    trial = new_trial()
    first = FakeSession({7: "disk"}, checkpoint_dir=tmp_path)
    session = suspended(first, tmp_path, "plain", trial=trial)
    train(session, tmp_path / "out", trial=trial)  # a second report would be a warning
    assert [unit for unit, _, _ in (*first.reports, *session.reports)] == [1, 2, 3]
    assert [*first.units_left, *session.units_left] == [2, 1, 0]
    assert session.trainings == [True]


def test_training_values(tmp_path: Path) -> None:
    """A value that training logs is reported too."""
    trial = new_trial()
    train(None, tmp_path, trial=trial, monitor="loss", logging_steps=5, eval_strategy="no")
    assert sorted(trial.study.trials[0].intermediate_values) == [1, 2, 3]


@pytest.mark.parametrize(
    ("monitor", "options", "reports"),
    [
        ("eval_loss", {"eval_strategy": "steps", "eval_steps": 4}, 4),  # the last of 15, too
        ("eval_loss", {"eval_strategy": "steps", "eval_steps": 4, "eval_delay": 5}, 3),
        ("eval_loss", {"max_steps": 12}, 3),
        ("eval_loss", {"eval_delay": 2}, 2),
        ("loss", {"logging_steps": 4}, 3),
        ("loss", {"logging_steps": 4, "logging_first_step": True}, 4),
        ("loss", {"logging_strategy": "epoch"}, 3),
    ],
)
def test_the_last_report_has_none_left(
    monitor: str, options: dict[str, Any], reports: int, tmp_path: Path
) -> None:
    """Also where evaluations do not divide the steps, or begin late, or logs begin early."""
    session = FakeSession(checkpoint_dir=tmp_path)
    train(session, tmp_path / "out", monitor=monitor, **options)
    assert session.units_left == list(range(reports))[::-1]


class Contrasting(transformers.Trainer):
    """Logs a value of its own with each loss, also before the first step has ended."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.log({"contrast": 1.0 / (1 + self.state.global_step)})
        return super().compute_loss(model, inputs, *args, **kwargs)


def test_a_value_of_the_first_step(tmp_path: Path) -> None:
    """How many units are left is not known before a step has ended."""
    session = FakeSession(checkpoint_dir=tmp_path)
    options = {"kind": Contrasting, "monitor": "contrast", "eval_strategy": "no"}
    train(session, tmp_path / "out", **options)
    assert [unit for unit, _, _ in session.reports] == [*range(1, EPOCHS * BATCHES + 1)]
    assert session.units_left[0] is None


def test_pruned(tmp_path: Path) -> None:
    """The study's pruner is asked after each unit."""
    trial = new_trial(pruner=optuna.pruners.ThresholdPruner(upper=-1.0))
    with pytest.raises(optuna.TrialPruned, match="Pruned after unit 1"):
        train(FakeSession(checkpoint_dir=tmp_path), tmp_path / "out", trial=trial)


class Numbered(Texts):
    """Is told the number of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class Short(transformers.TrainerCallback):
    """Ends each epoch before its time."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_epoch_stop = state.global_step % 2 == 0


def test_epochs_have_the_trainer_s_numbers(tmp_path: Path) -> None:
    """Also where a callback ends them early."""
    plain, data = Numbered(), Numbered()
    trainer(tmp_path, data=plain, parts=(Short,)).train()
    train(FakeSession(), tmp_path, data=data, parts=(Short,))
    # Accelerate's loader tells its data set twice.
    assert data.epochs == [*dict.fromkeys(plain.epochs)] == [*range(EPOCHS)]


def test_epochs_that_end_early_have_their_numbers_after_a_suspension(tmp_path: Path) -> None:
    """The Trainer counts them by its steps: two of five in each of these."""
    left = train(FakeSession(), tmp_path / "out", parts=(Short,))[1]
    session = FakeSession({3: "disk"}, checkpoint_dir=tmp_path)
    session = suspended(session, tmp_path, "plain", parts=(Short,)).again({1: "disk"})
    session = suspended(session, tmp_path, "plain", seed=2, parts=(Short,))
    data = Numbered()
    assert train(session, tmp_path / "out", data=data, seed=4, parts=(Short,))[1] == left
    assert data.epochs[-1] == EPOCHS - 1


def test_a_prediction_after_the_training_is_a_sign_of_life(tmp_path: Path) -> None:
    """It may take longer than a trial may be silent."""
    session = FakeSession()
    made = trainer(tmp_path)
    hermes = HermesCallback(new_trial(), _session=session)
    hermes.train(made)
    hermes._loop._next_beat = 0.0  # type: ignore[union-attr]
    before = len(session.beats)
    made.predict(Texts(16))
    assert len(session.beats) > before


class Stopping(transformers.TrainerCallback):
    """Decides in the training when to end, and how often to evaluate."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            state.max_steps, state.eval_steps = 11, 4


LONGER: dict[str, Any] = {
    "lr_scheduler_type": "constant",
    "num_train_epochs": 2 * EPOCHS,
    "eval_strategy": "steps",
    "eval_steps": 10,
    "logging_steps": 0.2,  # of all steps: 6
}
SHORTER = {**LONGER, "num_train_epochs": 1, "eval_steps": 5, "logging_steps": 6}


def test_limits_are_those_of_the_script(tmp_path: Path) -> None:
    """A study may be given more steps between two runs, and be evaluated less often."""
    session = FakeSession({4: "disk"}, checkpoint_dir=tmp_path)
    session = suspended(session, tmp_path, "plain", **SHORTER)
    left = train(FakeSession(), tmp_path / "out", **LONGER)[1]
    assert train(session, tmp_path / "out", seed=4, **LONGER)[1] == left
    assert json.loads(left)[-4] == 2 * EPOCHS * BATCHES


def test_limits_that_the_training_changes_come_back(tmp_path: Path) -> None:
    """They are no longer the script's."""
    own = {"parts": (Stopping,), "eval_strategy": "steps", "eval_steps": 5}
    left = train(FakeSession(), tmp_path / "out", **own)[1]
    session = FakeSession({3: "disk"}, checkpoint_dir=tmp_path)
    session = suspended(session, tmp_path, "plain", **own).again({4: "disk"})
    session = suspended(session, tmp_path, "plain", seed=2, **own)
    assert train(session, tmp_path / "out", seed=4, **own)[1] == left
    assert json.loads(left)[-4] == 11


def test_streams_wait_in_memory(tmp_path: Path, caplog: Any) -> None:
    """A place in them cannot be come back to: the run is not stored, and says why."""
    caplog.set_level("INFO")
    session = FakeSession({3: "disk"}, checkpoint_dir=tmp_path)
    train(session, tmp_path / "out", data=Stream())
    assert session.parks == ["resident"]
    assert "can only wait in memory: its training data are no map-style data set" in caplog.text


def test_a_value_that_is_not_there(tmp_path: Path) -> None:
    """The names that there are are told."""
    with pytest.raises(MonitorError, match=r"'eval_f1'.*there are: .*eval_loss"):
        train(None, tmp_path, monitor="eval_f1")


def test_the_trainer_s_own_train_is_refused(tmp_path: Path) -> None:
    """It would begin at step 0 when the run comes back."""
    made = trainer(tmp_path)
    made.add_callback(HermesCallback(new_trial()))
    with pytest.raises(InvalidInputError, match=r"call hermes\.train\(trainer\) instead"):
        made.train()


def test_a_search_for_the_batch_size_is_refused(tmp_path: Path) -> None:
    """It trains again from the beginning."""
    with pytest.raises(InvalidInputError, match="auto_find_batch_size"):
        train(FakeSession(), tmp_path, auto_find_batch_size=True)


def test_no_good_checkpoint(tmp_path: Path) -> None:
    """A run none of whose checkpoints is good is an error, never a restart from step 0."""
    session = suspended(FakeSession({3: "disk"}, checkpoint_dir=tmp_path), tmp_path, "plain")
    for state in session.checkpoints:
        Path(state.path).write_bytes(Path(state.path).read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"No checkpoint of trial 0 can be used.*must have"):
        train(session, tmp_path / "out")
