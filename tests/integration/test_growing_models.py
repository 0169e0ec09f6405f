"""Trainings whose objects change as they train: other parameters, and gradients that are sparse."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

from optuna_hermes.errors import Suspended
from optuna_hermes.pytorch import PyTorchLoop
from optuna_hermes.testing import FakeSession
from support.loops import by_way_of_disk, descend


def unfreezing(session: FakeSession) -> list[float]:
    """A loop that trains a second layer from its third epoch on."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model[1].parameters(), lr=0.05)
    run = PyTorchLoop(
        optuna.create_study().ask(), {"model": model, "optimizer": optimizer}, session
    )
    losses = run.kept.setdefault("losses", [])
    for epoch in run.epochs(5):
        if epoch == 2:
            optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.01})
        for x in run.batches([0.5, 1.0, 1.5]):
            loss = model(torch.full((2, 4), x)).square().mean()
            descend(loss, optimizer, losses, session)
        run.report(losses[-1])
    return losses


def test_a_trial_that_gets_other_parameters_waits_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No process could go on from its state; one that begins goes back to the last that fits."""
    losses = unfreezing(FakeSession())
    folder = tmp_path / "study" / "trial"
    assert unfreezing(FakeSession({8: "disk", 10: "disk"}, checkpoint_dir=folder)) == losses
    (warning,) = [each.message for each in caplog.records if "from here on" in each.message]
    assert "optimizer has other parameters, dtypes, layers or tied parts" in warning
    assert "can only wait in memory: optimizer has other" in caplog.text  # on the console
    assert by_way_of_disk(unfreezing, tmp_path / "other", 4) == losses


def swapping(session: FakeSession) -> list[float]:
    """A loop that drops nothing from its third epoch on."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run = PyTorchLoop(
        optuna.create_study().ask(), {"model": model, "optimizer": optimizer}, session
    )
    losses = run.kept.setdefault("losses", [])
    for epoch in run.epochs(5):
        if epoch == 2:
            model[1] = nn.Identity()
        for x in run.batches([0.5, 1.0, 1.5]):
            loss = model(torch.full((2, 4), x)).square().mean()
            descend(loss, optimizer, losses, session)
        run.report(losses[-1])
    return losses


def test_a_trial_with_a_layer_of_another_class_waits_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its parameters fit, but the next process makes the first one again."""
    losses = swapping(FakeSession())
    session = FakeSession({11: "disk"}, checkpoint_dir=tmp_path / "study" / "trial")
    assert swapping(session) == losses
    assert session.parks == ["resident"]
    (warning,) = [each.message for each in caplog.records if "from here on" in each.message]
    assert "model has other parameters, dtypes, layers or tied parts" in warning
    assert by_way_of_disk(swapping, tmp_path / "other", 4) == losses


class Late(nn.Module):
    """Makes a criterion without parameters when it is used first."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "criterion"):
            self.criterion = nn.MSELoss()
        found: torch.Tensor = self.criterion(self.net(x), x.sum(1, keepdim=True))
        return found


def making_late(session: FakeSession) -> list[float]:
    """A loop whose model has another class of layer by its begin, and one more with its use."""
    torch.manual_seed(1)
    model = Late()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run = PyTorchLoop(
        optuna.create_study().ask(), {"model": model, "optimizer": optimizer}, session
    )
    model.net[1] = nn.Sigmoid()
    losses = run.kept.setdefault("losses", [])
    for _ in run.epochs(4):
        for x in run.batches([0.5, 1.0, 1.5]):
            descend(model.loss(torch.full((2, 4), x)), optimizer, losses, session)
        run.report(losses[-1])
    return losses


def test_layers_that_each_process_makes_are_no_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Those made on first use have no parameters; others are converted before the loop."""
    losses = making_late(FakeSession())
    session = FakeSession(checkpoint_dir=tmp_path / "study" / "trial")
    assert making_late(session) == losses
    assert len(session.states) == 3
    assert by_way_of_disk(making_late, tmp_path / "other", 4, 2) == losses
    assert "from here on" not in caplog.text


def embedding(session: FakeSession) -> list[float]:
    """A loop that leaves the sparse gradients of its last batch where they are."""
    torch.manual_seed(1)
    table = nn.Embedding(20, 3, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.05)
    run = PyTorchLoop(
        optuna.create_study().ask(), {"table": table, "optimizer": optimizer}, session
    )
    losses = run.kept.setdefault("losses", [])
    for _ in run.epochs(3):
        for first in run.batches([0, 4, 8]):
            loss = (table(torch.tensor([first, first, 3])) - 1).square().mean()
            # Gradients of two batches add up.
            descend(loss, optimizer, losses, session, anew=run.batch != 1)
        run.report(losses[-1])
    return losses


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_sparse_gradients_come_back(tier: str, tmp_path: Path) -> None:
    """Coalesced or not."""
    losses = embedding(FakeSession())
    if tier == "host":
        session = FakeSession({1: "host", 5: "host"}, checkpoint_dir=tmp_path / "study" / "trial")
        assert embedding(session) == losses
    else:
        assert by_way_of_disk(embedding, tmp_path, 1, 4) == losses


def passing(session: FakeSession) -> list[float]:
    """A loop of a model with sparse buffers, whose indices change."""
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    model.register_buffer("rows", torch.eye(4).to_sparse_csr())
    model.register_buffer("edges", torch.eye(4).to_sparse(), persistent=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    run = PyTorchLoop(
        optuna.create_study().ask(), {"model": model, "optimizer": optimizer}, session
    )
    losses = run.kept.setdefault("losses", [])
    for _ in run.epochs(3):
        for x in run.batches([0.5, 1.0, 1.5]):
            grown = model.edges.to_dense()
            grown[len(losses) % 4, 0] += 1
            model.edges, model.rows = grown.to_sparse(), grown.T.to_sparse_csr()
            loss = model((model.rows @ (model.edges @ torch.full((4, 2), x))).T).square().mean()
            descend(loss, optimizer, losses, session)
        run.report(losses[-1])
    return losses


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("tier", ["host", "evicted", "disk"])
def test_sparse_buffers_come_back(tier: str, tmp_path: Path) -> None:
    """Of any layout."""
    losses = passing(FakeSession())
    folder = tmp_path / "study" / "trial"
    if tier == "disk":
        assert by_way_of_disk(passing, tmp_path, 1, 4) == losses
    elif tier == "host":
        session = FakeSession({1: "host", 5: "host"}, checkpoint_dir=folder)
        assert passing(session) == losses
    else:
        session = FakeSession({5: "host"}, checkpoint_dir=folder, evicts=("disk",))
        with pytest.raises(Suspended):
            passing(session)
        assert passing(session.again()) == losses


class Bank(nn.Module):
    """Keeps all samples in a buffer, which grows, and their mean in one that is None at first."""

    bank: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.register_buffer("bank", torch.zeros(0, 4))
        self.register_buffer("mean", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.bank = torch.cat([self.bank, x])
        self.mean = self.bank.mean(0)
        return self.layer(x - self.mean)


def banking(session: FakeSession, setup: Callable[..., Any] | None = None) -> list[float]:
    torch.manual_seed(1)
    model: Any = Bank()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.05)
    if setup is not None:
        model, optimizer = setup(model, optimizer)
    return fitting(session, model, optimizer)


def fitting(
    session: FakeSession,
    model: Any,
    optimizer: Any,
    begin: Callable[[int], object] = lambda epoch: None,
) -> list[float]:
    """The losses of three epochs; ``begin`` is called with the number of each."""
    run = PyTorchLoop(
        optuna.create_study().ask(), {"model": model, "optimizer": optimizer}, session
    )
    losses = run.kept.setdefault("losses", [])
    for epoch in run.epochs(3):
        begin(epoch)
        for x in run.batches([0.5, 1.0, 1.5]):
            loss = (model(torch.full((2, 4), x)) - x).square().mean()
            descend(loss, optimizer, losses, session)
        run.report(losses[-1])
    return losses


def test_a_buffer_that_grows_comes_back(tmp_path: Path) -> None:
    """A checkpoint of another size is no reason to lose a trial."""
    assert by_way_of_disk(banking, tmp_path, 4, 2) == banking(FakeSession())


def test_a_buffer_that_grows_within_fabric_comes_back(tmp_path: Path) -> None:
    """The module that wraps it has other names of buffers than its state."""
    train = functools.partial(banking, setup=Fabric(accelerator="cpu", devices=1).setup)
    assert by_way_of_disk(train, tmp_path, 4, 2) == train(FakeSession())


def pruning(session: FakeSession, *, named: bool) -> list[float]:
    """A loop that leaves a row of a weight out from its third epoch on."""
    torch.manual_seed(1)
    layer = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
    objects = {"layer": layer, "optimizer": optimizer} if named else {"optimizer": optimizer}
    run = PyTorchLoop(optuna.create_study().ask(), objects, session)
    losses = run.kept.setdefault("losses", [])
    for epoch in run.epochs(5):
        if epoch == 2:
            layer.weight, layer.bias = nn.Parameter(layer.weight[1:]), nn.Parameter(layer.bias[1:])
            optimizer.param_groups[0]["params"] = [layer.weight, layer.bias]
        for x in run.batches([0.5, 1.0, 1.5]):
            loss = layer(torch.full((2, 4), x)).square().mean()
            descend(loss, optimizer, losses, session)
        run.report(losses[-1])
    return losses


@pytest.mark.parametrize("named", [True, False])
def test_a_trial_whose_weights_get_another_size_waits_in_memory(
    named: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where only the optimizer, whose groups hold them, is named."""
    losses = pruning(FakeSession(), named=named)
    session = FakeSession({8: "disk"}, checkpoint_dir=tmp_path / "study" / "trial")
    assert pruning(session, named=named) == losses
    assert session.parks == ["resident"]
    (warning,) = [each.message for each in caplog.records if "from here on" in each.message]
    assert "optimizer has other parameters, dtypes, layers or tied parts" in warning
    assert by_way_of_disk(lambda now: pruning(now, named=named), tmp_path / "other", 4) == losses


def lazily(session: FakeSession) -> list[float]:
    torch.manual_seed(1)
    layer = nn.LazyLinear(1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
    run = PyTorchLoop(
        optuna.create_study().ask(), {"layer": layer, "optimizer": optimizer}, session
    )
    losses = run.kept.setdefault("losses", [])
    for _ in run.epochs(3):
        for x in run.batches([0.5, 1.0, 1.5]):
            loss = layer(torch.full((2, 4), x)).square().mean()
            descend(loss, optimizer, losses, session)
        run.report(losses[-1])
    return losses


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_weights_that_get_a_size_with_the_first_batch_come_back(tmp_path: Path) -> None:
    """They are not taken for weights of another size."""
    assert by_way_of_disk(lazily, tmp_path, 4, 2) == lazily(FakeSession())


class Adapted(nn.Module):
    """Trains a part of its weights at a time, and saves that only."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.net(x)
        return found

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        whole = super().state_dict(*args, **kwargs)
        return {
            name: each for name, each in whole.items() if self.get_parameter(name).requires_grad
        }


def adapting(session: FakeSession, setup: Callable[..., Any] = lambda *each: each) -> list[float]:
    torch.manual_seed(2 if session.checkpoints else 1)  # what is not restored is another one
    made = Adapted()
    model, optimizer = setup(made, torch.optim.SGD(made.parameters(), lr=0.05))

    def thaw(epoch: int) -> None:
        for number, layer in enumerate(made.net):
            layer.requires_grad_((number == 0) == (epoch == 0))

    return fitting(session, model, optimizer, thaw)


def test_weights_that_a_state_dict_leaves_out_come_back(tmp_path: Path) -> None:
    """A module's own ``state_dict`` is for files, and its trial is no file."""
    assert by_way_of_disk(adapting, tmp_path, 2, 4, 1) == adapting(FakeSession())


def test_weights_that_a_state_dict_leaves_out_within_fabric_come_back(tmp_path: Path) -> None:
    """The module that wraps it has other names of parameters than its state."""
    train = functools.partial(adapting, setup=Fabric(accelerator="cpu", devices=1).setup)
    assert by_way_of_disk(train, tmp_path, 2, 4, 1) == train(FakeSession())


class Rounded(nn.Linear):
    """Saves how its weight was rounded, and loads nothing of that, as layers of 4 bits do."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.absmax"] = torch.ones(1)


def rounding(session: FakeSession) -> list[float]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), Rounded(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run = PyTorchLoop(
        optuna.create_study().ask(), {"model": model, "optimizer": optimizer}, session
    )
    losses = run.kept.setdefault("losses", [])
    for _ in run.epochs(3):
        for x in run.batches([0.5, 1.0, 1.5]):
            descend(model(torch.full((2, 4), x)).square().mean(), optimizer, losses, session)
        run.report(losses[-1])
    return losses


def test_a_state_that_its_model_refuses_stays_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else the trial would be lost where it is loaded."""
    session = FakeSession({4: "disk"}, checkpoint_dir=tmp_path / "study" / "trial")
    assert rounding(session) == rounding(FakeSession())
    assert session.parks == ["resident"]
    assert "can only wait in memory: the state_dict of model holds 1.weight.absmax" in caplog.text


class Divided(torch.optim.SGD):
    """Has a part of its state in each process, as ``ZeroRedundancyOptimizer``."""

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("Its parts were not gathered. Please gather them.")


def test_an_optimizer_that_gives_no_state_stays_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its trial had failed at the first checkpoint."""
    session = FakeSession({1: "disk"}, checkpoint_dir=tmp_path / "study" / "trial")
    model = nn.Linear(1, 1)
    optimizer = Divided(model.parameters(), lr=0.05)
    parts = {"model": model, "optimizer": optimizer}
    run = PyTorchLoop(optuna.create_study().ask(), parts, session)
    losses: list[float] = []
    for _ in run.epochs(2):
        for x in run.batches([0.5, 1.0]):
            descend(model(torch.full((2, 1), x)).square().mean(), optimizer, losses, session)
        run.report(losses[-1])
    assert session.parks == ["resident"]
    assert "optimizer gives no state_dict (Its parts were not gathered)" in caplog.text


class Heads(nn.Module):
    """Has two heads, of which it uses one, and a count that is a buffer."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.used = self.first
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 0.1
        out: torch.Tensor = self.used(self.body(x.to(self.body.weight.dtype)))
        return out * self.count


def halve(model: Heads, optimizer: torch.optim.Optimizer) -> None:
    model.bfloat16()


def tie(model: Heads, optimizer: torch.optim.Optimizer) -> None:
    model.first.weight = model.body.weight


def use_the_other(model: Heads, optimizer: torch.optim.Optimizer) -> None:
    model.used = model.second


def renew(model: Heads, optimizer: torch.optim.Optimizer) -> None:
    model.first.weight = nn.Parameter(model.first.weight.detach().clone())


def count_in_double(model: Heads, optimizer: torch.optim.Optimizer) -> None:
    model.count = model.count.double() / 3


def hook_a_layer(model: Heads, optimizer: torch.optim.Optimizer) -> None:
    model.first.register_forward_hook(lambda module, inputs, out: out * 1.5)


def hook_a_weight(model: Heads, optimizer: torch.optim.Optimizer) -> None:
    model.first.weight.register_hook(lambda gradient: gradient * 0.5)


def hook_the_optimizer(model: Heads, optimizer: torch.optim.Optimizer) -> None:
    optimizer.register_step_post_hook(lambda *args: None)


def unhook(model: Heads, optimizer: torch.optim.Optimizer) -> None:
    model.body._forward_hooks.popitem()


Change = Callable[[Heads, torch.optim.Optimizer], None]


def changing(session: FakeSession, change: Change | None, at: int = 2) -> list[float]:
    """A loop with a ``change`` before the batches of an epoch."""
    torch.manual_seed(1)
    model = Heads()
    model.body.register_forward_hook(lambda module, inputs, out: out * 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = PyTorchLoop(
        optuna.create_study().ask(), {"model": model, "optimizer": optimizer}, session
    )
    losses = run.kept.setdefault("losses", [])
    for epoch in run.epochs(5):
        if epoch == at and change is not None:
            change(model, optimizer)
        for x in run.batches([0.5, 1.0, 1.5]):
            loss = (model(torch.full((2, 4), x)) - x).square().mean()
            descend(loss, optimizer, losses, session)
        run.report(losses[-1])
    return losses


@pytest.mark.parametrize("change", [halve, tie, use_the_other, renew])
def test_a_trial_with_another_dtype_or_tied_parts_waits_in_memory(
    change: Change, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its parameters have the names and sizes of those that the next process makes."""
    losses = changing(FakeSession(), change)
    session = FakeSession({11: "disk"}, checkpoint_dir=tmp_path / "study" / "trial")
    assert changing(session, change) == losses
    assert session.parks == ["resident"]
    (warning,) = [each.message for each in caplog.records if "from here on" in each.message]
    assert "model" in warning
    assert "has other parameters, dtypes, layers or tied parts" in warning
    assert by_way_of_disk(lambda now: changing(now, change), tmp_path / "other", 4) == losses


def test_a_buffer_that_gets_another_dtype_comes_back(tmp_path: Path) -> None:
    """It is not rounded to the first one."""
    losses = changing(FakeSession(), count_in_double)
    assert by_way_of_disk(lambda now: changing(now, count_in_double), tmp_path, 8, 3) == losses


@pytest.mark.parametrize("at", [pytest.param(0, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(
    ("change", "name"),
    [
        (hook_a_layer, "model.hooks"),
        (hook_a_weight, "model.hooks"),
        (unhook, "model.hooks"),
        (hook_the_optimizer, "optimizer.hooks"),
    ],
)
def test_hooks_that_the_training_registers_or_removes_are_named(
    change: Change, name: str, at: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The next process lacks them, or has those that were removed."""
    by_way_of_disk(lambda now: changing(now, change, at), tmp_path / "named", 8)
    (warning,) = [each.message for each in caplog.records if "no checkpoint" in each.message]
    assert f"changes {name} while it trains" in warning
    caplog.clear()
    by_way_of_disk(lambda now: changing(now, None), tmp_path / "quiet", 8)
    assert "no checkpoint" not in caplog.text


class Decaying(torch.optim.Optimizer):
    """Counts its steps in an attribute, which the inherited ``state_dict`` lacks."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each -= group["lr"] / self.steps * each.grad


def freezing(session: FakeSession) -> list[float]:
    """A loop that names the optimizer only, and freezes a layer from its third epoch on."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = Decaying(model.parameters())
    run = PyTorchLoop(optuna.create_study().ask(), {"optimizer": optimizer}, session)
    losses = run.kept.setdefault("losses", [])
    for epoch in run.epochs(5):
        if epoch == 2:
            model[0].requires_grad_(False)
        for x in run.batches([0.5, 1.0, 1.5]):
            loss = model(torch.full((2, 4), x)).square().mean()
            descend(loss, optimizer, losses, session)
        run.report(losses[-1])
    return losses


def test_what_an_optimizer_counts_and_its_frozen_parameters_come_back(tmp_path: Path) -> None:
    """Also where no model is named."""
    assert by_way_of_disk(freezing, tmp_path, 4, 5) == freezing(FakeSession())
