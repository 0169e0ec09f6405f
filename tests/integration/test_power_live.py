"""Devices that are powered down and up by the user's commands, with a real broker."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import optuna
import pytest

from optuna_hermes import HermesPruner, HermesSampler, optimize
from optuna_hermes.broker import connect_or_start
from optuna_hermes.broker._power_commands import power_commands
from optuna_hermes.errors import BrokerConflictError
from optuna_hermes.ledger import open_ledger

SCRIPT = """#!/bin/sh
echo "$1 $2 begin $(date +%s.%N)" >> {record}
echo "switching $2 $1"
echo "$1 $2 end $(date +%s.%N)" >> {record}
"""


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """File to which the commands write, line by line."""
    script = tmp_path / "power"
    script.write_text(SCRIPT.format(record=tmp_path / "record"))
    script.chmod(0o700)
    return tmp_path / "record"


def _objective(record: Path, n_together: int, word: str) -> Callable[[optuna.Trial], float]:
    """Trials that end when so many of them have run at once, and a word is in the record."""
    folder = record.parent

    def objective(trial: optuna.Trial) -> float:
        trial.report(1.0, 1)
        trial.should_prune()
        (folder / f"{n_together}-{trial.number}").touch()
        deadline = time.monotonic() + 60
        while len(list(folder.glob(f"{n_together}-*"))) < n_together or word not in (
            record.read_text() if record.exists() else ""
        ):
            assert time.monotonic() < deadline, f"{word!r} did not happen"
            time.sleep(0.1)
        return trial.suggest_float("x", 0, 1)

    return objective


@pytest.fixture
def unpowered(runtime_dir: Path) -> Path:
    """File that a killed broker has left: its first device has no power."""
    path = runtime_dir / "unpowered.json"
    path.write_text('["cpu:0"]')
    path.chmod(0o600)
    return path


def _commands(record: Path) -> tuple[str, str]:
    return f"{record.parent}/power down {{device}}", f"{record.parent}/power up {{device}}"


def _study(url: str) -> optuna.Study:
    sampler = HermesSampler(devices="cpu:4", policy="energy:fifo")
    return optuna.create_study(storage=url, sampler=sampler, pruner=HermesPruner())


def _check_order(record: Path, url: str) -> None:
    """Of each device: down with nothing on it, then up, and only then trials again."""
    with closing(open_ledger(url)) as ledger:
        leases = ledger.load_leases()
        events = [event for event in ledger.load_events(leases[0].study) if event.number is None]
    lines = [line.split() for line in record.read_text().splitlines()]
    assert {line[1] for line in lines} >= {"cpu:0", "cpu:3"}
    for device in {line[1] for line in lines}:
        switched = [line for line in lines if line[1] == device]
        both = [(way, when) for way in ("down", "up") for when in ("begin", "end")]
        expected = both[2:] if device == "cpu:0" else both
        assert [(line[0], line[2]) for line in switched] == expected
        down = float(switched[0][3]) if device != "cpu:0" else 0.0
        up = float(switched[-1][3])
        spans = [(x.started, x.ended) for x in leases if x.devices[0].endswith(f"/{device}")]
        assert all((ended is not None and ended <= down) or began >= up for began, ended in spans)
        assert any(began >= up for began, _ in spans)
    told = [(e.kind, e.detail["device"]) for e in events if e.kind.startswith("power")]
    assert told.count(("powered down", "cpu:3")) == told.count(("powered up", "cpu:3")) == 1


def test_devices_are_switched_in_the_right_order(
    record: Path, tmp_path: Path, runtime_dir: Path, unpowered: Path
) -> None:
    """A device goes down while nothing is on it, and trains again only after it was woken."""
    url = f"sqlite:///{tmp_path}/study.db"
    study = _study(url)
    connect_or_start("viewer", "cpu:4", power_commands(*_commands(record))).close()
    # One trial and one device in reserve: of the three that are up one is not needed.
    study.optimize(_objective(record, 1, "down cpu:3 end"), n_trials=1)
    assert {"cpu:0", "cpu:3"}.issubset(json.loads(unpowered.read_text()))
    study.optimize(_objective(record, 4, "up cpu:0 end"), n_trials=4, n_jobs=4)
    assert not unpowered.exists()
    _check_order(record, url)
    assert "switching cpu:3 down" in (runtime_dir / "broker.log").read_text()


@pytest.mark.slow
def test_the_same_holds_for_workers(record: Path, tmp_path: Path, unpowered: Path) -> None:
    """A study that `optimize` runs needs less at its end, and more when it is given more trials."""
    url = f"sqlite:///{tmp_path}/study.db"
    study = _study(url)
    down, up = _commands(record)
    settings: dict[str, Any] = {
        "devices": "cpu:4",
        "policy": "energy:fifo",
        "power_down_command": down,
        "power_up_command": up,
        "show_progress": False,
    }
    optimize(study, _objective(record, 1, "down cpu:3 end"), n_trials=1, **settings)
    assert {"cpu:0", "cpu:3"}.issubset(json.loads(unpowered.read_text()))
    optimize(study, _objective(record, 4, "up cpu:0 end"), n_trials=5, **settings)
    assert not unpowered.exists()
    _check_order(record, url)


@pytest.mark.slow
def test_a_broker_with_other_commands_makes_way_if_it_is_idle(record: Path) -> None:
    """One in use is not replaced; whoever asks for no commands takes it as it is."""
    power = power_commands(f"{record.parent}/power down {{device}}", "/bin/echo {device}")
    other = power_commands("/bin/echo {device}", "/bin/echo {device}")
    assert power is not None
    first = connect_or_start("driver", "cpu:1", power)
    assert first.welcome.power == power.texts
    connect_or_start("viewer", "cpu:1").close()
    with pytest.raises(BrokerConflictError, match="other power commands: leave these out, wait"):
        connect_or_start("viewer", "cpu:1", other)
    first.close()
    second = connect_or_start("viewer", "cpu:1", other)
    assert second.welcome.pid != first.welcome.pid
    second.close()
