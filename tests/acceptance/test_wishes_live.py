"""``hold``, ``boost``, ``release``, ``finish`` and ``policy``, said to a study that runs."""

from __future__ import annotations

import contextlib
import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from optuna_hermes.broker import connect
from optuna_hermes.cli import run
from optuna_hermes.errors import BrokerError

OBJECTIVE = textwrap.dedent(
    """
    import os
    import torch
    from optuna_hermes import suspendable

    def objective(trial):
        torch.set_num_threads(1)
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=trial.suggest_float("lr", 0.01, 0.1))
        loader = torch.utils.data.DataLoader(torch.ones(200, 1), batch_size=1)
        run = suspendable(trial, model=model, optimizer=optimizer)
        for _ in run.epochs(100_000):
            for x in run.batches(loader):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            run.report(float(model.weight.detach().square()))
            if os.path.exists("end"):
                break
        return run.value
    """
)


def status() -> dict[str, Any]:
    """What the broker tells of its one study."""
    with contextlib.closing(connect("viewer")) as connection:
        document: Any = connection.ask_status()
    (study,) = document["studies"]
    return dict(study)


def running() -> set[int]:
    """Trials that train and have reported; none while there is no broker, or nothing to serve."""
    try:
        runs = status()["runs"]
    except (BrokerError, ValueError):
        return set()
    return {r["trial"] for r in runs if r["state"] == "running" and r["units"] > 1}


def test_what_people_want_is_done(
    start_cli: Callable[..., Any],
    storage_url: str,
    tmp_path: Path,
    wait_for: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two devices, three trials: one is held, one finished as it trains, and one boosted.

    When only the held one is left the study ends by itself. Released, it is carried on.
    """
    (tmp_path / "train.py").write_text(OBJECTIVE)
    study = ("--storage", storage_url, "--study-name", "s")
    optimize = (
        *("optimize", "train.py:objective", *study, "--n-trials", 3, "--devices", "cpu:2"),
        *("--policy", "fifo", "--slice-seconds", 0.1, "--seed", 0, "--json"),
    )

    def say(*words: str) -> Any:
        assert run([words[0], *study, "--json", *words[1:]]) == 0
        return json.loads(capsys.readouterr().out)

    optuna.create_study(storage=storage_url, study_name="s")
    driver = start_cli(*optimize)
    wait_for(lambda: running() == {0, 1}, 60, "two trials train")

    assert say("hold", "0") == {"trials": [0], "wish": "held", "served": True}
    wait_for(lambda: running() == {1, 2}, 30, "another one has its device")

    assert say("policy", "round-robin") == {"study": "s", "policy": "round-robin"}
    assert say("boost", "2")["wish"] == "boosted"
    seen = status()
    assert (seen["policy"], seen["held"], seen["boosted"]) == ("round-robin", [0], [2])

    assert list(say("finish", "1")["finished"]) == ["1"]
    trials = optuna.load_study(study_name="s", storage=storage_url).trials
    assert trials[1].state == TrialState.COMPLETE
    assert trials[1].value == trials[1].intermediate_values[max(trials[1].intermediate_values)]

    (tmp_path / "end").touch()
    done = driver.wait()
    assert done.returncode == 0, done.stderr
    assert "1 trial that somebody holds" in done.stderr
    document = json.loads(done.stdout)
    assert document["policy"] == "round-robin"
    assert [t["state"] for t in document["trials"]] == ["STORED", "COMPLETE", "COMPLETE"]

    assert say("status", "0")["wish"] == "held"
    assert say("release", "0") == {"trials": [0], "wish": None, "served": False}
    again = start_cli(*optimize).wait()
    assert again.returncode == 0, again.stderr
    assert {t["state"] for t in json.loads(again.stdout)["trials"]} == {"COMPLETE"}
    kinds = [event["kind"] for event in say("status", "0")["events"]]
    assert kinds.index("held") < kinds.index("no longer held") < kinds.index("finished")
