"""Tensors that Lightning's own checkpoints lack, or bring back otherwise, come back from disk.

Where no process could take a state up, the trial waits in memory.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import numpy as np
import optuna
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint, ModelPruning
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from optuna_hermes.errors import CheckpointError
from optuna_hermes.lightning import HermesCallback
from optuna_hermes.suspend._modules._module_state import left_out
from optuna_hermes.testing import FakeSession
from support.loops import by_way_of_disk

BATCHES = 4
Seen = tuple[list[float], dict[str, list[Any]]]


class Net(pl.LightningModule):
    """A small network that keeps its losses; parts of it are replaced by the tests."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.net = self.make()

    def make(self) -> nn.Module:
        return nn.Linear(4, 1)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = (self.net(x) - x.sum()).square().mean()
        return found

    def training_step(self, x: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.loss(x)
        self.losses.append(loss.item())
        self.log("loss", loss, on_epoch=True, batch_size=1)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class ByHand(Net):
    """Optimizes by hand; the gradients of two batches add up."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, x: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(x, batch_idx)
        self.manual_backward(loss)
        self.optimizers().step()
        if batch_idx % 2 == 0:
            self.optimizers().zero_grad()
        return loss


class Ticks(Callback):
    """Tells the session of every batch."""

    def __init__(self, session: FakeSession) -> None:
        self._session = session

    def on_train_batch_end(self, *args: Any) -> None:
        self._session.tick()


def train(
    net: type[Net],
    session: FakeSession,
    *,
    callbacks: Callable[[], list[Callback]] = list,
    look: Callable[[Net], Any] = lambda module: None,
) -> tuple[list[float], dict[str, Any], Any]:
    """One process of a run: its losses, its weights, and what ``look`` finds in its module."""
    torch.manual_seed(2 if session.checkpoints else 1)  # what is not restored is another one
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    module = net()
    hermes = HermesCallback(optuna.create_study().ask(), "loss", _session=session)
    made = callbacks()
    trainer = pl.Trainer(
        max_epochs=3,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=any(isinstance(each, ModelCheckpoint) for each in made),
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[hermes, *made, Ticks(session)],
    )
    samples = [torch.tensor([1.0, 0.5, -0.5, 0.1]) * (1 + i) for i in range(BATCHES)]
    trainer.fit(module, DataLoader(samples, batch_size=1))
    weights = {name: each.to_dense().tolist() for name, each in module.state_dict().items()}
    return module.losses, weights, look(module)


def check(net: type[Net], folder: Path, *stops: int, **options: Any) -> None:
    """A run through disk is one that was never stored, nor suspended."""
    expected = train(net, FakeSession(), **options)
    assert len(expected[0]) == 3 * BATCHES
    one = functools.partial(train, net, **options)
    assert by_way_of_disk(one, folder, *(stops or (1, 4, 2))) == expected


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


# -- gradients ------------------------------------------------------------------------------------


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 3, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = int(x[0, 0])
        found: torch.Tensor = self.table(torch.tensor([first, first, 3]))
        return found


class SparseByHand(ByHand):
    """Has sparse gradients, coalesced or not."""

    def make(self) -> nn.Module:
        return Table()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SparseAdam(self.parameters(), lr=0.05)


class SparseByHooks(Net):
    """Has sparse gradients of several batches by a hook of its own."""

    def make(self) -> nn.Module:
        return Table()

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SparseAdam(self.parameters(), lr=0.05)


@pytest.mark.parametrize("net", [SparseByHand, SparseByHooks])
def test_sparse_gradients_come_back(net: type[Net], tmp_path: Path) -> None:
    """Also where a trial is only stored, and never suspended."""
    stored = FakeSession(checkpoint_dir=tmp_path / "stored" / "trial")
    assert train(net, stored) == train(net, FakeSession())
    assert len(stored.states) == 2
    check(net, tmp_path)


class Graph(Net):
    """Multiplies by sparse tensors, in buffers and in an attribute, which change and grow."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.eye(4).to_sparse_csr())
        self.register_buffer("edges", torch.eye(4).to_sparse(), persistent=False)
        self.weights = torch.eye(4).to_sparse()

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        grown = self.edges.to_dense()
        grown[len(self.losses) % 4, 0] += 1
        self.edges, self.rows = grown.to_sparse(), grown.T.to_sparse_csr()
        self.weights = self.weights * 1.5
        return super().loss((self.rows @ (self.edges @ (self.weights @ x.T))).T.tanh())


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_sparse_tensors_of_a_module_come_back(tmp_path: Path) -> None:
    """Also with other indices than those that the next process makes."""
    check(Graph, tmp_path)


class ChannelsLast(ByHand):
    """Its gradients have the memory format of its weights."""

    def make(self) -> nn.Module:
        layer = nn.Conv2d(4, 6, 3, padding=1)
        return layer.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.net(x.reshape(1, 4, 1, 1).expand(1, 4, 5, 5)).square().mean()
        return found

    def on_train_batch_start(self, *args: Any) -> None:
        gradient = self.net.weight.grad
        assert gradient is None or gradient.stride() == self.net.weight.stride()


def test_gradients_come_back_in_their_memory_format(tmp_path: Path) -> None:
    """A restored gradient is laid out as its parameter."""
    check(ChannelsLast, tmp_path)


class ReadsGradients(Net):
    """Weighs its loss by the gradients of the batch before, which Lightning resets after that."""

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        gradient = self.net.weight.grad
        weight = 1.0 if gradient is None else 1 + 0.1 * gradient.norm().tanh()
        return super().loss(x) * weight


def test_gradients_may_be_read_in_the_next_batch(tmp_path: Path) -> None:
    """Until Lightning resets them they are there, in another process, too."""
    check(ReadsGradients, tmp_path)


# -- optimizers -----------------------------------------------------------------------------------


class Sharp(torch.optim.Optimizer):
    """SAM: another optimizer steps with the gradients of a point nearby, and has all momentum."""

    def __init__(self, parameters: Any, rho: float = 0.05, **options: Any) -> None:
        super().__init__(parameters, {"rho": rho, **options})
        self.base_optimizer = torch.optim.SGD(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        parameters = [each for group in self.param_groups for each in group["params"]]
        with torch.no_grad():
            moves = [self.param_groups[0]["rho"] * each.grad.sign() for each in parameters]
            for each, move in zip(parameters, moves, strict=True):
                each.add_(move)
            self.zero_grad()
            with torch.enable_grad():
                closure()
            for each, move in zip(parameters, moves, strict=True):
                each.sub_(move)
        self.base_optimizer.step()
        self.zero_grad()
        return loss


class Lookahead(torch.optim.Optimizer):
    """Pulls slow weights after the fast ones of another optimizer; it stores what it likes."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        super().__init__(optimizer.param_groups, {})
        self.param_groups = optimizer.param_groups
        for each in self._parameters():
            self.state[each]["slow"] = each.detach().clone()

    def _parameters(self) -> list[torch.Tensor]:
        return [each for group in self.param_groups for each in group["params"]]

    def step(self, closure: Any = None) -> Any:
        loss = self.optimizer.step(closure)
        with torch.no_grad():
            for each in self._parameters():
                each.copy_(self.state[each]["slow"].lerp_(each, 0.5))
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"slow": [self.state[each]["slow"] for each in self._parameters()]}

    def load_state_dict(self, state: Any) -> None:
        for each, slow in zip(self._parameters(), state["slow"], strict=True):
            self.state[each]["slow"].copy_(slow)


class ByAddress(Lookahead):
    """Stores slow weights by the addresses of the fast ones, as copies of it in many projects."""

    made: ClassVar[list[torch.optim.Optimizer]] = []
    """All of them: no address is used again, as in another process it mostly is not."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self.made.append(self)

    def state_dict(self) -> dict[str, Any]:
        slow = {id(key) if type(key) is not int else key: each for key, each in self.state.items()}
        return {"slow": slow, "fast": self.optimizer.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        self.optimizer.load_state_dict(state["fast"])
        groups = state["fast"]["param_groups"]
        torch.optim.Optimizer.load_state_dict(
            self, {"state": state["slow"], "param_groups": groups}
        )
        self.param_groups = self.optimizer.param_groups


class SharpNet(ByHand):
    """Optimizes with SAM, by hand, at a rate that a schedule sets in the groups of both."""

    def training_step(self, x: torch.Tensor, batch_idx: int) -> torch.Tensor:
        def closure() -> torch.Tensor:
            loss = self.loss(x)
            self.manual_backward(loss)
            return loss

        loss = self.optimizers().step(closure)
        assert isinstance(loss, torch.Tensor)
        self.losses.append(loss.item())
        self.log("loss", loss, on_epoch=True, batch_size=1)
        self.lr_schedulers().step()
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = Sharp(self.parameters(), lr=0.01, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)]


class LookaheadNet(Net):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Lookahead(torch.optim.Adam(self.parameters(), lr=0.05))


class ByAddressNet(Net):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return ByAddress(torch.optim.Adam(self.parameters(), lr=0.05))


class Warmed(torch.optim.lr_scheduler.LRScheduler):
    """A schedule that leaves the rates to another one, which its ``state_dict`` lacks."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.after = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        super().__init__(optimizer)

    def step(self, epoch: Any = None) -> None:
        self.last_epoch += 1
        if self.last_epoch > 2:
            self.after.step()

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last_epoch = state["last_epoch"]


class Gradual(Warmed):
    """One whose ``state_dict`` is torch's: it holds the other schedule itself."""

    state_dict = torch.optim.lr_scheduler.LRScheduler.state_dict
    load_state_dict = torch.optim.lr_scheduler.LRScheduler.load_state_dict


class WarmedNet(Net):
    kind: type[Warmed] = Warmed

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": self.kind(optimizer), "interval": "step"}]


class GradualNet(WarmedNet):
    kind = Gradual


@pytest.mark.parametrize("net", [SharpNet, LookaheadNet, ByAddressNet, WarmedNet, GradualNet])
def test_what_optimizers_and_schedules_hold_comes_back(net: type[Net], tmp_path: Path) -> None:
    """The momentum of the optimizer within, its settings, and the count of the schedule within."""
    check(net, tmp_path)


class FullStatistics(torch.optim.Optimizer):
    """Keeps averages in full precision of parameters in half precision."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                for each in group["params"]:
                    average = self.state[each].setdefault("average", torch.zeros(each.shape))
                    average.mul_(0.97).add_(each.grad.float(), alpha=0.031)
                    each.sub_(average * 0.1)
        return loss


class HalfNet(Net):
    def make(self) -> nn.Module:
        return nn.Linear(4, 1).to(torch.bfloat16)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return super().loss(x.to(torch.bfloat16))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return FullStatistics(self.parameters(), {})


def averages(module: Net) -> list[Any]:
    """The states of its optimizer, with their dtypes."""
    (optimizer,) = module.trainer.optimizers
    found = [optimizer.state[each]["average"] for each in module.parameters()]
    return [(each.dtype, each.tolist()) for each in found]


def test_states_of_optimizers_keep_their_dtypes(tmp_path: Path) -> None:
    """Torch casts them to the dtype of the parameter, which rounds them."""
    check(HalfNet, tmp_path, look=averages)


# -- attributes of parameters ---------------------------------------------------------------------


class Binary(Net):
    """BinaryConnect: the weights are signs, and what is trained is an attribute of theirs."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.001)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        for each in self.net.parameters():
            if not hasattr(each, "org"):
                each.org = each.data.clone()
            each.data.copy_(each.org.sign())
        return super().loss(x)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        for each in self.net.parameters():
            each.data.copy_(each.org)

    def optimizer_step(self, *args: Any, **options: Any) -> None:
        super().optimizer_step(*args, **options)
        for each in self.net.parameters():
            each.org.copy_(each.data.clamp(-1, 1))
            each.data.copy_(each.org.sign())


class BinaryFromTheStart(Binary):
    """Sets these attributes in a hook before the first batch, which is not called again."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 0:
            for each in self.net.parameters():
                each.org = each.data.clone() * 0.5


def originals(module: Net) -> list[Any]:
    found = [each.org.tolist() for each in module.net.parameters()]
    assert all(0 < abs(each) < 1 for each in found[0][0])
    return found


@pytest.mark.parametrize("net", [Binary, BinaryFromTheStart])
def test_attributes_of_parameters_come_back(net: type[Net], tmp_path: Path) -> None:
    """Binarised networks keep the real weights there."""
    check(net, tmp_path, look=originals)


class Locked(Net):
    """Hangs something on a buffer that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(1))

    def on_train_batch_start(self, *args: Any) -> None:
        self.steps.seen = iter(range(len(self.losses)))


def test_what_cannot_be_stored_of_a_buffer_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As it is of modules."""
    train(Locked, FakeSession(checkpoint_dir=tmp_path / "study" / "trial"))
    assert "Locked.steps.seen" in caplog.text


# -- buffers that begin as None -------------------------------------------------------------------


class Normed(Net):
    """Measures its first batch, and sees the others by that."""

    persistent = True

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Module()
        self.part.register_buffer("stat", None, persistent=self.persistent)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        if self.part.stat is None:
            self.part.stat = x.mean(0).detach()
        return super().loss(x - self.part.stat)


class NormedAnew(Normed):
    persistent = False


class Bank(Net):
    """Keeps all samples in a buffer, which grows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(0, 4))

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        self.bank = torch.cat([self.bank, x.detach()])
        return super().loss(x - self.bank.mean(0))


class Forgets(Net):
    """Has a buffer, which no ``state_dict`` has, in its first epoch only."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((1,), 1.5), persistent=False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.scale = None

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return super().loss(x if self.scale is None else self.scale * x)


@pytest.mark.parametrize("net", [Normed, NormedAnew, Bank, Forgets])
def test_buffers_that_are_made_in_training_come_back(net: type[Net], tmp_path: Path) -> None:
    """Buffers come back, in a ``state_dict`` or not, in another shape too; those gone stay gone."""
    check(net, tmp_path)


# -- weights that a ``state_dict`` of the module's own leaves out ----------------------------------


class Follows(Net):
    """Is held near averages of its weights, which its files lack."""

    def __init__(self) -> None:
        super().__init__()
        self.average = copy.deepcopy(self.net).requires_grad_(False)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        whole = super().state_dict(*args, **kwargs)
        return {name: each for name, each in whole.items() if "average" not in name}

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for slow, fast in zip(self.average.parameters(), self.net.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        return super().loss(x) + (self.net(x) - self.average(x)).square().mean()


class SavesTrained(Net):
    """Saves what it trains only, and trains its first layer for one epoch."""

    strict_loading = False

    def make(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net[0].requires_grad_(False)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        whole = super().state_dict(*args, **kwargs)
        return {
            name: each for name, each in whole.items() if self.get_parameter(name).requires_grad
        }


class SavesHalves(Net):
    """Saves its weights in half precision."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {name: each.half() for name, each in super().state_dict(*args, **kwargs).items()}


class SavesOldNames(Net):
    """Saves its weights by the names of an earlier version."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {f"old.{name}": each for name, each in super().state_dict(*args, **kwargs).items()}

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        own = {name.removeprefix("old."): each for name, each in state_dict.items()}
        return super().load_state_dict(own, *args, **kwargs)


@pytest.mark.parametrize("net", [Follows, SavesTrained, SavesHalves, SavesOldNames])
def test_weights_that_are_left_out_come_back(net: type[Net], tmp_path: Path) -> None:
    """A ``state_dict`` of the module's own is for files; under other names nothing is left out."""
    check(net, tmp_path, look=lambda module: [each.tolist() for each in module.parameters()])
    module = net()
    expected = {"average.weight", "average.bias"} if net is Follows else set()
    if net is SavesHalves:
        expected = {"net.weight", "net.bias"}
    assert left_out(module, module.state_dict()).keys() == expected


class Tagged(torch.Tensor):
    """A tensor of a class of its own, as MONAI's are: whatever is computed from it is one, too."""

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec)

    def __deepcopy__(self, memo: Any) -> Tagged:
        return self.clone()  # type: ignore[return-value]


class LogsTagged(Net):
    """Logs losses and averages of this class."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        loss = super().loss(x).as_subclass(Tagged)
        self.mean(loss.detach())
        self.log("mean", self.mean, on_step=True, on_epoch=True, batch_size=1)
        return loss


def test_logged_values_may_be_tensors_of_other_classes(tmp_path: Path) -> None:
    """They, and the best ones that callbacks keep, are stored as the numbers that they are."""

    def callbacks() -> list[Callback]:
        return [EarlyStopping("loss", patience=99), ModelCheckpoint(tmp_path, monitor="loss")]

    def look(module: Net) -> Any:
        trainer: Any = module.trainer
        metrics = {name: float(each) for name, each in trainer.callback_metrics.items()}
        stops, saves = trainer.early_stopping_callback, trainer.checkpoint_callback
        return metrics, float(stops.best_score), float(saves.best_model_score)

    check(LogsTagged, tmp_path / "run", callbacks=callbacks, look=look)


class Rounded(nn.Linear):
    """Saves how its weight was rounded, and loads nothing of that, as layers of 4 bits do."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.absmax"] = torch.ones(1)


class LoadsRounded(Rounded):
    """Loads that, too."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        state_dict.pop(f"{prefix}weight.absmax")
        super()._load_from_state_dict(state_dict, prefix, *args)


class Quantized(Net):
    def make(self) -> nn.Module:
        return nn.Sequential(Rounded(4, 1))


class QuantizedLoosely(Quantized):
    strict_loading = False


class QuantizedAnew(Net):
    def make(self) -> nn.Module:
        return nn.Sequential(LoadsRounded(4, 1))


def test_a_state_that_its_module_refuses_stays_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else the trial would be lost where it is loaded."""
    session = FakeSession({5: "disk"}, checkpoint_dir=tmp_path / "study" / "trial")
    assert train(Quantized, session) == train(Quantized, FakeSession())
    assert session.parks == ["resident"]
    assert "the state_dict of its module holds net.0.weight.absmax" in caplog.text


@pytest.mark.parametrize("net", [QuantizedLoosely, QuantizedAnew])
def test_a_state_that_its_module_takes_is_stored(net: type[Net], tmp_path: Path) -> None:
    """The module says so, or a layer of it loads by itself."""
    check(net, tmp_path)


# -- hooks that are written for the files of ModelCheckpoint --------------------------------------


class Exports(Net):
    """Writes its weights elsewhere, and leaves all out."""

    exported: ClassVar[list[int]] = []

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.exported.append(len(self.losses))
        checkpoint.clear()


class Thins(Net):
    """Saves some of its weights, in half precision, and something of its own."""

    loaded: ClassVar[list[int]] = []

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        weights = checkpoint["state_dict"]
        del weights["net.bias"]
        weights["net.weight"] = weights["net.weight"].half()
        checkpoint["optimizer_states"].clear()
        checkpoint["batches"] = len(self.losses)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert checkpoint["state_dict"]["net.weight"].dtype == torch.half
        assert "net.bias" not in checkpoint["state_dict"]
        self.loaded.append(checkpoint["batches"])


class Replaces(Net):
    """Saves nothing but weights, by other names."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        weights = {f"old.{name}": each for name, each in checkpoint["state_dict"].items()}
        checkpoint.clear()
        checkpoint.update(weights)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert list(checkpoint) == ["old.net.weight", "old.net.bias"]


class BeginsAnew(Net):
    """Takes no more than weights from a file."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["optimizer_states"].clear()
        checkpoint["callbacks"] = {}
        del checkpoint["loops"], checkpoint["state_dict"]["net.bias"]


class Scaler:
    """An object of a library, as it is put into the files of ``ModelCheckpoint``."""


class PutsObjects(Net):
    """Saves objects that each process makes, as libraries for forecasts do, and reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.scaler = Scaler()
        self.criterion = nn.MSELoss()
        self.save_hyperparameters({"scaler": self.scaler})

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["data"] = {"scalers": [self.scaler], "batches": [len(self.losses)]}
        checkpoint["special"] = self.criterion, None
        checkpoint["hyper_parameters"].update(criterion=self.criterion)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert checkpoint["data"]["scalers"] == [self.scaler]
        assert checkpoint["data"]["batches"][0] > 0
        self.criterion = checkpoint["special"][0]


@pytest.mark.parametrize("net", [Exports, Thins, Replaces, BeginsAnew, PutsObjects])
def test_hooks_do_not_decide_what_comes_back(net: type[Net], tmp_path: Path) -> None:
    """The form that a module's hooks give a checkpoint is for them alone."""
    Thins.loaded.clear()
    check(net, tmp_path)
    if net is Thins:
        assert Thins.loaded == [1, 5, 7]
    assert not Exports.exported  # nobody would read what that hook adds


class PutsFitted(PutsObjects):
    """Saves an object that only the training makes."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["scaler"] = self.scaler if self.losses else None


def test_an_object_that_the_training_makes_is_refused(tmp_path: Path) -> None:
    """A hook that finds another kind of object in the next process fails the trial."""
    with pytest.raises(
        CheckpointError, match=r"on_save_checkpoint .* scaler .* is now \S*NoneType"
    ):
        check(PutsFitted, tmp_path)


class Averages(Callback):
    """Saves averages in the place of weights, and nothing of the optimizers."""

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        weights = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: 0.5 * each for name, each in weights.items()}
        del checkpoint["optimizer_states"]
        checkpoint["batches"] = len(module.losses)


class LoadsAverages(Averages):
    """Goes on from the averages in a file."""

    loaded: ClassVar[list[int]] = []

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        assert "optimizer_states" not in checkpoint
        assert not torch.equal(module.net.weight, checkpoint["state_dict"]["net.weight"])
        module.load_state_dict(checkpoint["state_dict"])
        self.loaded.append(checkpoint["batches"])


class LoadsLittle(Callback):
    """Takes no more than weights from a file."""

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["optimizer_states"].clear()
        checkpoint["callbacks"] = {}
        del checkpoint["loops"], checkpoint["lr_schedulers"]


class Reads(Net):
    """Reads what a callback has added to a file."""

    loaded: ClassVar[list[int]] = []

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded.append(checkpoint["batches"])


@pytest.mark.parametrize(
    ("callback", "net"),
    [(Averages, Net), (LoadsAverages, Net), (LoadsLittle, Net), (Averages, Reads)],
)
def test_hooks_of_callbacks_do_not_either(
    callback: type[Callback], net: type[Net], tmp_path: Path
) -> None:
    """Those of the module and of callbacks get what theirs have made of a checkpoint."""
    LoadsAverages.loaded.clear()
    Reads.loaded.clear()
    check(net, tmp_path, callbacks=lambda: [callback()])
    assert LoadsAverages.loaded == ([1, 5, 7] if callback is LoadsAverages else [])
    assert Reads.loaded == ([1, 5, 7] if net is Reads else [])


# -- other parts than at the beginning ------------------------------------------------------------


class Grows(Net):
    """Gets a layer in its second epoch."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net = nn.Sequential(self.net, nn.Linear(1, 1))


class Shrinks(Net):
    """Loses a buffer in its second epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((1,), 1.5))

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.scale = None

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return super().loss(x if self.scale is None else self.scale * x)


class Thaws(Net):
    """Trains a second layer from its second epoch on."""

    def make(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.trainer.optimizers[0].add_param_group({"params": self.net[0].parameters()})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.net[1].parameters(), lr=0.01)


class Plays(Net):
    """Trains against its former selves, of which there are two at most."""

    def __init__(self) -> None:
        super().__init__()
        self.opponents: list[nn.Module] = []

    def on_train_epoch_start(self) -> None:
        if self.current_epoch:
            self.opponents = [*self.opponents, copy.deepcopy(self.net)][-2:]

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return super().loss(x - sum(float(each(x).detach()) for each in self.opponents))


class Swaps(Net):
    """Drops nothing from its second epoch on."""

    def make(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 1), nn.Dropout(0.5))

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net[1] = nn.Identity()


class Average:
    """A moving average of weights, as users write it."""

    def __init__(self, module: nn.Module) -> None:
        self.weights = {name: each.clone() for name, each in module.state_dict().items()}

    def update(self, module: nn.Module) -> None:
        for name, each in module.state_dict().items():
            self.weights[name].lerp_(each, 0.1)

    def state_dict(self) -> dict[str, Any]:
        return self.weights

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights = dict(state)


class Averaged(Net):
    """Averages its weights from its second epoch on."""

    def __init__(self) -> None:
        super().__init__()
        self.average: Average | None = None

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.average = Average(self.net)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        if self.average is None:
            return super().loss(x)
        self.average.update(self.net)
        return super().loss(x - self.average.weights["bias"])


class Wide(Net):
    """Has two layers of one shape."""

    def make(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return super().loss(x.to(self.net[0].weight.dtype))


class Halves(Wide):
    """Has half the bits from its second epoch on."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.bfloat16()


class Ties(Wide):
    """Has one weight in two layers from its second epoch on."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net[1].weight = self.net[0].weight


class Uses(Wide):
    """Has another name for one layer, and for another one from its second epoch on."""

    def __init__(self) -> None:
        super().__init__()
        self.used = self.net[0]

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.used = self.net[1]

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return super().loss(self.used(x))


class Scales(Callback):
    """Makes each loss larger."""

    def on_before_backward(self, trainer: Any, module: Any, loss: torch.Tensor) -> None:
        loss.mul_(1.5)


class Calls(Net):
    """Gets a callback in its second epoch."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.trainer.callbacks.append(Scales())


@pytest.mark.parametrize(
    ("net", "what"),
    [
        (Grows, "its module has other par"),
        (Shrinks, "its module has other par"),
        (Swaps, "its module has other par"),
        (Halves, "its module has other par"),
        (Ties, "its module has other par"),
        (Uses, "its module has other par"),
        (Calls, "its trainer has other par"),
        (Thaws, "its optimizer 0 has other par"),
        (Plays, "its training has put into Plays.opponents what no"),
        (Averaged, "its training has put into Averaged.average what no"),
    ],
)
def test_a_trial_that_gets_other_parts_waits_in_memory(
    net: type[Net], what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No process could go on from its state; one that begins goes back to the last that fits."""
    expected = train(net, FakeSession())
    folder = tmp_path / "study" / "trial"
    session = FakeSession({6: "disk", 9: "disk"}, checkpoint_dir=folder)
    assert train(net, session) == expected
    assert session.parks == ["resident", "resident"]
    (warning,) = [each.message for each in caplog.records if "from here on" in each.message]
    assert f"only wait in memory from here on: {what}" in warning
    check(net, tmp_path / "other", 2)


class GrowsAgain(Grows):
    """Makes the layer again before its weights are loaded."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if "net.1.weight" in checkpoint["state_dict"]:
            self.net = nn.Sequential(self.net, nn.Linear(1, 1))

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            super().on_train_epoch_start()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        first = self.net[0] if isinstance(self.net, nn.Sequential) else self.net
        return torch.optim.SGD(first.parameters(), lr=0.01)


class AveragedAgain(Averaged):
    """Makes the average again before its weights are loaded."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if checkpoint["global_step"] > BATCHES:
            self.average = Average(self.net)


@pytest.mark.parametrize("net", [GrowsAgain, AveragedAgain])
def test_a_module_may_make_its_parts_again_itself(net: type[Net], tmp_path: Path) -> None:
    """Its own ``on_load_checkpoint`` can make room for what the checkpoint holds."""
    check(net, tmp_path, 2, 4)


class Forgetful(Averaged):
    """Loads something else."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        pass


def test_what_a_module_does_not_make_again_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its average begins anew."""
    by_way_of_disk(functools.partial(train, Forgetful), tmp_path / "study" / "trial", 6, 3)
    assert "Trial 0 changes Forgetful.average while it trains" in caplog.text


class Draws(Net):
    """Makes its generators when it needs them, and others later."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: Any = None
        self.several: list[Any] = []

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        if self.drawn is None:
            self.drawn = np.random.default_rng(3)
        if len(self.losses) % 3 == 1:
            self.several.append(torch.Generator().manual_seed(len(self.losses)))
        noise = sum(float(torch.rand(1, generator=each)) for each in self.several)
        return super().loss(x + self.drawn.random() + noise)


def test_generators_that_are_made_in_training_come_back(tmp_path: Path) -> None:
    """Unlike other objects, they can be made anew."""
    check(Draws, tmp_path)


class MakesLate(Net):
    """Has another class of layer when it begins, and makes one without parameters on first use."""

    def make(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 1), nn.Tanh())

    def on_train_start(self) -> None:
        self.net[1] = nn.Sigmoid()

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "criterion"):
            self.criterion = nn.SmoothL1Loss()
        found: torch.Tensor = self.criterion(self.net(x).sum(), x.sum())
        return found


def test_layers_that_each_process_makes_are_no_other_parts(tmp_path: Path) -> None:
    """A trial that has them still goes to disk."""
    check(MakesLate, tmp_path)


class Doubles(Wide):
    """Has twice the bits before its first batch, but after its weights are loaded."""

    def on_fit_start(self) -> None:
        self.double()


def test_a_dtype_that_each_process_sets_is_no_other_one(tmp_path: Path) -> None:
    """Weights are not rounded to that of a module that is to be converted."""
    check(Doubles, tmp_path)


class Decaying(torch.optim.SGD):
    """Counts its steps in an attribute, which the inherited ``state_dict`` lacks."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        self.param_groups[0]["lr"] = 0.01 / self.steps
        return super().step(closure)


class TakesOver(Net):
    """Steps its schedule more often from its second epoch on, and itself from its third."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.trainer.lr_scheduler_configs[0].interval = "step"
        self.automatic_optimization = self.current_epoch < 2

    def training_step(self, x: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(x, batch_idx)
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(2 * loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)]


class Counts(Net):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Decaying(self.parameters(), lr=0.01)


@pytest.mark.parametrize("net", [TakesOver, Counts])
def test_how_a_module_is_optimized_comes_back(net: type[Net], tmp_path: Path) -> None:
    """Manual optimization, intervals of schedules, and counts in attributes of optimizers."""
    check(net, tmp_path, BATCHES + 1, BATCHES, 1)


class Hooked(Net):
    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net.register_forward_hook(lambda module, inputs, out: out * 1.5)


def test_hooks_that_the_training_registers_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The next process lacks them."""
    by_way_of_disk(functools.partial(train, Hooked), tmp_path, BATCHES + 1)
    assert "Trial 0 changes Hooked.hooks while it trains" in caplog.text


class NamedLikeHooks(Net):
    def __init__(self) -> None:
        super().__init__()
        self.use_hooks = True
        self._require_grads_hooks = [self.net.weight.register_hook(lambda gradient: gradient)]


def test_attributes_that_are_named_like_hooks_are_none(tmp_path: Path) -> None:
    """As those of transformers for gradient checkpointing: a list of handles."""
    check(NamedLikeHooks, tmp_path)


def test_pruned_weights_are_no_other_parts(tmp_path: Path) -> None:
    """Masks are made again, so that a pruned trial still goes to disk."""

    def callbacks() -> list[Callback]:
        options: dict[str, Any] = {"use_lottery_ticket_hypothesis": False}
        return [ModelPruning("l1_unstructured", amount=0.3, **options)]

    check(Wide, tmp_path, 1, 5, 2, callbacks=callbacks)
