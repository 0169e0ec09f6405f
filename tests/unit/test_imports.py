"""Requirements, loaded modules and cost of importing the package."""

from __future__ import annotations

import importlib
import importlib.util
import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {"torch", "lightning", "pytorch_lightning", "sqlalchemy", "typer", "rich", "sklearn"}
ROUNDS = 7
PROMISED_RATIO = 1.2
WITHOUT_TORCH = """import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in {'torch', 'lightning', 'pytorch_lightning'}:
            raise ModuleNotFoundError(f'No module named {name!r}', name=name)
sys.meta_path.insert(0, Absent())
"""


def _python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _modules_after(statement: str) -> set[str]:
    code = f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    return set(json.loads(_python(code)))


def _import_seconds(name: str) -> float:
    # Processor time: whatever else the machine does stretches the wall clock, not this.
    code = (
        "import time\nstart = time.process_time()\n"
        f"import {name}\nprint(time.process_time() - start)"
    )
    return float(_python(code))


def test_imports_without_torch_and_lightning() -> None:
    """The package imports, with every public name, where torch and Lightning are not installed."""
    _python(
        f"{WITHOUT_TORCH}"
        "from optuna_hermes import *\n"
        "import optuna_hermes\n"
        "for name in optuna_hermes.__all__:\n"
        "    getattr(optuna_hermes, name)\n"
    )


@pytest.mark.parametrize("name", ["huggingface", "lightgbm", "sklearn", "xgboost"])
def test_a_missing_extra_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever imports a module without what it needs is told what to type."""
    package = {"huggingface": "transformers"}.get(name, name)
    for module in list(sys.modules):
        if module.split(".")[0] == package or module == f"optuna_hermes.{name}":
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=rf"needs {package}, .*optuna-hermes\[{name}\]"):
        importlib.import_module(f"optuna_hermes.{name}")


@pytest.mark.parametrize("name", ["huggingface", "lightgbm", "sklearn", "xgboost"])
def test_a_missing_torch_is_named(name: str) -> None:
    """It is part of the same extra, of which someone may have one package only."""
    if importlib.util.find_spec({"huggingface": "transformers"}.get(name, name)) is None:
        pytest.skip(f"{name} is not installed")
    said = _python(
        f"{WITHOUT_TORCH}"
        "try:\n"
        f"    import optuna_hermes.{name}\n"
        "except ModuleNotFoundError as error:\n"
        "    print(error)\n"
    )
    assert said.startswith(f"optuna_hermes.{name} needs torch, ")
    assert f"optuna-hermes[{name}]" in said


def test_import_loads_nothing_heavy() -> None:
    """Importing the package loads no heavy library that ``import optuna`` does not load too."""
    added = _modules_after("import optuna_hermes") - _modules_after("import optuna")
    assert not HEAVY & added


def test_a_broker_listens_before_it_imports_what_takes_long() -> None:
    """SQLAlchemy and NumPy are imported once it listens."""
    added = _modules_after("import optuna_hermes.broker.__main__")
    assert not {"sqlalchemy", "numpy", "optuna"} & added


def test_a_lazy_package_has_every_name() -> None:
    """Names whose modules are imported on first use are there, and listed; others are not."""
    package = importlib.import_module("optuna_hermes.ledger")
    assert all(hasattr(package, each) for each in package._HOMES)
    assert {*package._HOMES, "TrialRecord", "open_ledger"} <= set(dir(package))
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        _ = package.nothing_of_this_name


@pytest.mark.timeout(600)
def test_import_is_as_fast_as_optuna() -> None:
    """``import optuna_hermes`` takes at most 1.2 times as long as ``import optuna``."""
    ours, theirs = [], []
    for _ in range(ROUNDS):  # interleaved, so that a slow moment of the machine hits both
        theirs.append(_import_seconds("optuna"))
        ours.append(_import_seconds("optuna_hermes"))
    ratio = statistics.median(ours) / statistics.median(theirs)
    assert ratio <= PROMISED_RATIO, f"{ratio:.2f} times: {ours} s against {theirs} s"


def test_a_broker_of_cpu_slots_is_no_client_and_knows_no_clusters() -> None:
    """A client's side, a driver, and what few hosts or studies need, is loaded on first use."""
    loaded = _modules_after(
        "import optuna_hermes.broker.__main__\n"
        "from optuna_hermes.broker._devices._source import Devices, parse_devices\n"
        "from optuna_hermes.broker._core._broker_state import BrokerState\n"
        "from optuna_hermes.broker._core._event_handler import EventHandler\n"
        "from optuna_hermes.broker._core._events import Tick\n"
        "from optuna_hermes.policies import make_policy\n"
        "devices = Devices(parse_devices('cpu:2')).poll().devices\n"
        "EventHandler(BrokerState(host='here'), devices).handle(Tick(), 0.0)\n"
        "make_policy('hermes')"
    )
    later = (
        "broker._client.",
        "broker._core._boosts",
        "broker._core._curve_shape",
        "broker._core._elastic",
        "broker._core._overrides",
        "broker._core._power",
        "broker._core._recovery",
        "broker._core._residency",
        "broker._core._reattach",
        "broker._core._shared_studies",
        "broker._core._trial_order",
        "broker._devices._claims",
        "broker._devices._nvml",
        "broker._power_commands",
        "broker._server._activity",
        "broker._server._metrics",
        "broker._server._peer_sync",
        "broker._server._power_switches",
        "broker._server._readings",
        "cluster",
    )
    names = tuple(f"optuna_hermes.{name}" for name in later)
    assert not [module for module in loaded if module.startswith(names)]


def test_a_lightning_trial_loads_what_few_trials_need_on_first_use(tmp_path: Path) -> None:
    """Ranks, elastic sizes, streams and loader processes are not loaded for a trial without them.

    The trial saves its units, goes to disk, and comes back from there.
    """
    loaded = _modules_after(
        "from pathlib import Path\n"
        "import lightning as L, optuna, torch\n"
        "from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset\n"
        "from optuna_hermes.errors import Suspended\n"
        "from optuna_hermes.lightning import HermesCallback\n"
        "from optuna_hermes.testing import FakeSession\n"
        "class Ticks(L.Callback):\n"
        "    def on_train_batch_end(self, *args):\n"
        "        session.tick()\n"
        "class Module(BoringModel):\n"
        "    def training_step(self, batch, batch_idx):\n"
        "        self.log('loss', loss := self.step(batch))\n"
        "        return loss\n"
        "    val_dataloader = None\n"
        "    validation_step = None\n"
        "def fit():\n"
        "    hermes = HermesCallback(optuna.create_study().ask(), 'loss', _session=session)\n"
        "    loader = torch.utils.data.DataLoader(RandomDataset(32, 8), batch_size=2)\n"
        "    L.Trainer(max_epochs=2, accelerator='cpu', logger=False, enable_checkpointing=False,\n"
        "        enable_progress_bar=False, enable_model_summary=False,\n"
        "        callbacks=[hermes, Ticks()]).fit(Module(), loader)\n"
        "    return hermes.value\n"
        f"session = FakeSession({{6: 'disk'}}, checkpoint_dir=Path({str(tmp_path)!r}))\n"
        "try:\n"
        "    fit()\n"
        "except Suspended:\n"
        "    session = session.again()\n"
        "assert session.checkpoints and fit() is not None\n"
    )
    later = (
        "_lightning._csv_logs",
        "_lightning._ddp",
        "_lightning._devices",
        "_lightning._elastic",
        "_lightning._event_logs",
        "_lightning._schedules",
        "suspend._loaders._elastic",
        "suspend._values._objects",
        "suspend._ranks._rank",
        "suspend._loaders._streams",
        "suspend._values._custom",
        "suspend._loaders._workers",
    )
    names = tuple(f"optuna_hermes.{name}" for name in later)
    assert "optuna_hermes._lightning._checkpoints" in loaded
    assert not [module for module in loaded if module.startswith(names)]
