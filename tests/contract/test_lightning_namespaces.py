"""The same callback for ``lightning.pytorch`` and for ``pytorch_lightning``, apart and together."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pickle
import sys
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.trial import FixedTrial
from torch.utils.data import DataLoader, TensorDataset

from optuna_hermes._lightning import _namespace
from optuna_hermes.errors import Suspended
from optuna_hermes.lightning import HermesCallback
from optuna_hermes.testing import FakeSession

INSTALLED = [root for root in _namespace.ROOTS if importlib.util.find_spec(root.partition(".")[0])]

each_namespace = pytest.mark.parametrize("root", INSTALLED)
both = pytest.mark.skipif(len(INSTALLED) < 2, reason="needs both distributions of Lightning")


def stand_ins() -> list[tuple[str, str]]:
    """The modules and names for which there are stand-ins, as type checkers see them."""
    tree = ast.parse(Path(_namespace.__file__).read_text())
    return [
        (str(node.module), alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("lightning.pytorch")
        for alias in node.names
    ]


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``imported(*roots)``: as if the process had imported these namespaces and no other."""

    def only(*roots: str) -> None:
        found = {root: importlib.import_module(root) for root in roots}
        for root in _namespace.ROOTS:
            monkeypatch.delitem(sys.modules, root, raising=False)
        for root, module in found.items():
            monkeypatch.setitem(sys.modules, root, module)

    return only


def net_of(root: str, session: FakeSession) -> Any:
    """A module of that Lightning which draws random numbers, and counts its batches."""
    pl = importlib.import_module(root)

    class Net(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            session.tick()
            noise = 0.1 * torch.randn_like(batch[0])
            loss: torch.Tensor = self.layer(batch[0] + noise).square().mean()
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
            self.log("val_loss", self.layer(batch[0]).square().mean())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    return Net()


def trained(root: str, session: FakeSession, callback: Any = None) -> list[float]:
    """The weights at the end of a fit, and the values that it has reported.

    Raises:
        Suspended: it is on disk.
    """
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(1)))
    model = net_of(root, session)
    callback = callback or HermesCallback(optuna.create_study().ask(), "val_loss", _session=session)
    trainer = importlib.import_module(root).Trainer(
        max_epochs=3,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
    )
    trainer.fit(model, DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=8))
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    return [*weights.tolist(), *(value for _, _, value in session.reports)]


@each_namespace
@pytest.mark.parametrize(("module", "name"), stand_ins(), ids=lambda each: str(each))
def test_a_stand_in_is_for_one_class_of_each_namespace(root: str, module: str, name: str) -> None:
    """The name that ``isinstance`` goes by is the one under which Lightning defines the class."""
    pl = importlib.import_module(module.replace("lightning.pytorch", root))
    kind = getattr(pl, name)
    assert kind.__qualname__ == name
    assert kind.__module__.startswith(f"{root}.")
    assert issubclass(kind, getattr(_namespace, name))
    assert not issubclass(dict, getattr(_namespace, name))


@each_namespace
def test_a_callback_is_one_of_the_lightning_that_is_imported(root: str, imported: Any) -> None:
    """Though the class was imported before; and it goes by one name in checkpoints."""
    imported(root)
    made = HermesCallback(FixedTrial({}), "val_loss")
    assert isinstance(made, importlib.import_module(root).Callback)
    assert isinstance(made, HermesCallback)
    assert made.state_key == "HermesCallback"
    again = pickle.loads(pickle.dumps(made))
    assert type(again) is type(made)
    assert vars(again).keys() == vars(made).keys()


@both
def test_a_callback_is_one_of_both_where_both_are_imported(imported: Any) -> None:
    """Whichever Trainer it is given to."""
    imported(*INSTALLED)
    made = HermesCallback(FixedTrial({}), "val_loss")
    assert all(isinstance(made, importlib.import_module(root).Callback) for root in INSTALLED)
    assert type(made) is type(HermesCallback(FixedTrial({}), "val_loss"))


@each_namespace
def test_a_trial_comes_back_from_disk_in_each_namespace(root: str, tmp_path: Path) -> None:
    """Its weights and values are those of a run that was never suspended."""
    whole = trained(root, FakeSession())
    first = FakeSession({8: "disk"}, checkpoint_dir=tmp_path)
    with pytest.raises(Suspended):
        trained(root, first)
    *weights, second, third = trained(root, first.again())
    assert [*weights, first.reports[0][2], second, third] == whole


@both
def test_a_callback_that_was_made_too_early_is_no_part_of_what_the_trainer_trains(
    imported: Any,
) -> None:
    """Made before its Trainer's Lightning was imported, it works there or is refused at once."""
    imported(INSTALLED[0])
    session = FakeSession()
    callback = HermesCallback(optuna.create_study().ask(), "val_loss", _session=session)
    other = INSTALLED[1]
    imported(*INSTALLED)
    try:
        trained(other, session, callback)
    except (TypeError, ValueError):  # Lightning's own, from the Trainer
        assert not session.reports
    else:
        assert len(session.reports) == 3
