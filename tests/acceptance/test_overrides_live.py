"""``hold``, ``boost``, ``release``, ``finish`` and ``policy``, said to a study that runs."""

from __future__ import annotations

import contextlib
import json
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from optuna_hermes.broker import connect
from optuna_hermes.broker._protocol import StudyStatus
from optuna_hermes.cli import run
from optuna_hermes.cli._top import StudySource
from optuna_hermes.errors import BrokerError, HermesError

OBJECTIVE = textwrap.dedent(
    """
    import os
    import time
    import torch
    from optuna_hermes import suspendable

    def objective(trial):
        torch.set_num_threads(1)
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=trial.suggest_float("lr", 0.01, 0.1))
        loader = torch.utils.data.DataLoader(torch.ones(20, 1), batch_size=1)
        run = suspendable(trial, model=model, optimizer=optimizer)
        for _ in run.epochs(100_000):
            for x in run.batches(loader):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                time.sleep(0.01)  # what a larger network would take, without the heat
            run.report(float(model.weight.detach().square()))
            if os.path.exists("end"):
                break
        return run.value
    """
)


def status() -> StudyStatus:
    """Return the broker's status of its one study."""
    with contextlib.closing(connect("viewer")) as connection:
        (study,) = connection.ask_status().studies
    return study


def running() -> set[int]:
    """Trials that train and have reported; none while there is no broker, or nothing to serve.

    It is asked again and again, but not by a loop that takes a core for itself.
    """
    time.sleep(0.1)
    try:
        trials = status().trials
    except (BrokerError, ValueError):
        return set()
    return {t.number for t in trials if t.state == "running" and t.units > 1}


def test_what_people_want_is_done(
    start_cli: Callable[..., Any],
    storage_url: str,
    tmp_path: Path,
    wait_for: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    """Two devices, three trials: one is held, one finished as it trains, and one boosted.

    `top` shows it, and says some of it. When only the held one is left the study ends by itself.
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
    wait_for(lambda: running() == {0, 1}, 120, "two trials train")

    top = StudySource(storage_url, "s")
    request.addfinalizer(top.close)
    picture = top.look("")
    assert (picture.study, picture.policy, picture.read_only) == ("s", "fifo", "")
    assert {device.holder.trial for device in picture.devices if device.holder} == {0, 1}
    curves = {trial.number: trial for trial in picture.trials}
    assert curves[0].curve[-1] == curves[0].value
    assert curves[0].slope is not None
    assert {bar.device.partition("/")[2] for bar in top.past()} == {"cpu:0", "cpu:1"}

    assert say("hold", "0") == {"trials": [0], "override": "held", "served": True}
    wait_for(lambda: running() == {1, 2}, 60, "another one has its device")

    assert run(["policy", *study, "energy:fifo"]) == 0
    assert "energy:fifo powers no device down" in capsys.readouterr().err  # without commands
    assert say("policy", "round-robin") == {"study": "s", "policy": "round-robin"}
    top.override(picture.key, 2, "boosted")
    seen = status()
    assert (seen.policy, seen.held, seen.boosted) == ("round-robin", (0,), (2,))

    top.finish(picture.key, 1)
    trials = optuna.load_study(study_name="s", storage=storage_url).trials
    assert trials[1].state == TrialState.COMPLETE
    assert trials[1].value == trials[1].intermediate_values[max(trials[1].intermediate_values)]

    top.past()  # the screen asks for it at any time: it is of now, not of the study's end
    (tmp_path / "end").touch()
    done = driver.wait()
    assert done.returncode == 0, done.stderr
    assert "1 trial that somebody holds" in done.stderr
    document = json.loads(done.stdout)
    assert document["policy"] == "round-robin"
    assert [t["state"] for t in document["trials"]] == ["STORED", "COMPLETE", "COMPLETE"]

    over = top.look("")
    assert "No broker of yours" in over.read_only
    held = over.trials[0]
    assert over.trials[2].state == "done"
    assert (held.state, held.override) == ("stored", "held")
    assert over.trials[1].curve[-1] == over.trials[1].value == trials[1].value
    with pytest.raises(HermesError):
        top.override(picture.key, 0, None)

    assert say("status", "0")["override"] == "held"
    assert say("release", "0") == {"trials": [0], "override": None, "served": False}
    kinds = [event["kind"] for event in say("status", "0")["events"]]
    assert kinds.index("held") < kinds.index("suspended") < kinds.index("no longer held")
