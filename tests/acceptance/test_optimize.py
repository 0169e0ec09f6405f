"""``optuna-hermes optimize`` as its users run it: processes, signals, a database on disk."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from optuna_hermes import _optuna
from optuna_hermes.ledger import LeaseRecord, Ledger, open_ledger

TINY = Path(__file__).parent / "tiny.py"
LIGHT = TINY.with_name("light.py")
EPOCHS = 8
N_TRIALS = 6

DYING = """
import os
from pathlib import Path
from optuna_hermes import _optuna
from tiny import only_reports as objective

open_trial = _optuna.open_trial

def dies_once(*args, **options):
    trial = open_trial(*args, **options)
    if trial.number == 1 and not Path("died").exists():
        Path("died").touch()
        os._exit(9)
    return trial

_optuna.open_trial = dies_once
"""

Cli = Callable[..., subprocess.CompletedProcess[str]]
StartCli = Callable[..., Any]


def command(storage: str, name: str = "objective", **options: object) -> list[object]:
    given = {"n_trials": N_TRIALS, "devices": "cpu:2", "seed": 0, "slice_seconds": 0.1, **options}
    flags = [part for key, value in given.items() for part in (f"--{key.replace('_', '-')}", value)]
    target = name if ":" in name else f"{TINY}:{name}"
    return ["optimize", target, "--storage", storage, "--study-name", "s", *flags, "--json"]


def load(storage: str) -> optuna.Study:
    return optuna.load_study(study_name="s", storage=storage)


@contextlib.contextmanager
def ledger_of(storage: str) -> Iterator[Ledger]:
    ledger = open_ledger(_optuna.ledger_url(load(storage)))
    yield ledger
    ledger.close()


def check_leases(storage: str) -> list[LeaseRecord]:
    """Prove from the ledger that no device was ever held twice; returns all leases."""
    with ledger_of(storage) as ledger:
        leases = ledger.load_leases()
    epochs = [lease.epoch for lease in leases]
    assert epochs == sorted(set(epochs)), "epochs only grow"
    by_device: dict[str, list[LeaseRecord]] = {}
    for lease in leases:
        for device in lease.devices:
            by_device.setdefault(device, []).append(lease)
    for held in by_device.values():
        for before, after in itertools.pairwise(held):
            assert before.ended is not None
            assert before.ended <= after.started, f"{before} and {after} overlap"
    return leases


def check_finished(storage: str, n_trials: int = N_TRIALS) -> list[optuna.trial.FrozenTrial]:
    trials = load(storage).trials
    assert [trial.state for trial in trials] == [TrialState.COMPLETE] * n_trials
    for trial in trials:
        assert sorted(trial.intermediate_values) == list(range(1, EPOCHS + 1))
        assert trial.value == trial.intermediate_values[EPOCHS]
    return trials


@pytest.fixture
def reference(cli: Cli, tmp_path: Path) -> dict[tuple[float, float], float]:
    """Values by parameters of an undisturbed run with the same seed."""
    storage = f"sqlite:///{tmp_path / 'reference.db'}"
    assert cli(*command(storage, policy="fifo")).returncode == 0
    return {key(trial): trial.value for trial in load(storage).trials}


def key(trial: optuna.trial.FrozenTrial) -> tuple[float, float]:
    return trial.params["lr"], trial.params["p"]


def test_a_study_is_run_to_its_end(cli: Cli, storage_url: str) -> None:
    """Every trial completes, most were suspended, and Optuna's own command shows the values.

    The same command once more does nothing, and says so in its JSON.
    """
    done = cli(*command(storage_url))
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    check_finished(storage_url)
    assert check_leases(storage_url)
    assert document["best"]["value"] == load(storage_url).best_value
    assert {trial["units"] for trial in document["trials"]} == {EPOCHS}
    assert sum(trial["suspensions"] > 0 for trial in document["trials"]) >= N_TRIALS // 2
    optunas = subprocess.run(
        [
            *(Path(sys.executable).parent / "optuna", "trials", "-f", "json"),
            *("--storage", storage_url, "--study-name", "s"),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    shown = {row["number"]: row["value"] for row in json.loads(optunas.stdout)}
    assert [shown[t["number"]] for t in document["trials"]] == [
        t["value"] for t in document["trials"]
    ]
    again = cli(*command(storage_url))
    assert again.returncode == 0
    assert json.loads(again.stdout)["trials"] == document["trials"]


@pytest.mark.slow  # the short storm compares all values of a study too
@pytest.mark.parametrize(
    ("objective", "n_trials", "usual"), [("objective", 6, 1), ("long_epochs", 16, EPOCHS // 3)]
)
def test_slicing_changes_no_value(
    cli: Cli, tmp_path: Path, objective: str, n_trials: int, usual: int
) -> None:
    """Fixed trials, an epoch at a time in turn or each at a stretch: the same values.

    Slices are longer where an epoch takes less than 60 switches: hence the second objective.
    """
    values, suspensions = {}, {}
    for policy in ("fifo", "round-robin"):
        storage = f"sqlite:///{tmp_path / policy}.db"
        study = optuna.create_study(storage=storage, study_name="s")
        for number in range(n_trials):
            study.enqueue_trial(
                {"lr": 10 ** (-4 + 3 * number / n_trials), "p": number / (2 * n_trials)}
            )
        done = cli(
            *command(storage, objective, policy=policy, n_trials=n_trials), deadline_seconds=280
        )
        assert done.returncode == 0, done.stderr
        trials = check_finished(storage, n_trials)
        values[policy] = [trial.intermediate_values for trial in trials]
        results = json.loads(done.stdout)["trials"]
        suspensions[policy] = [trial["suspensions"] for trial in results]
    assert values["fifo"] == values["round-robin"]
    assert suspensions["fifo"] == [0] * n_trials
    assert min(suspensions["round-robin"]) >= 1
    assert sum(suspensions["round-robin"]) >= n_trials * usual


@pytest.mark.slow  # of what may die, a worker and a broker do at every change
def test_a_killed_trial_is_carried_on(
    start_cli: StartCli,
    cli: Cli,
    storage_url: str,
    wait_for: Callable[..., Any],
    reference: dict[tuple[float, float], float],
) -> None:
    """After SIGKILL of the group the same command loses nothing and repeats a unit at most."""
    running = start_cli(*command(storage_url))
    wait_for(lambda: reports(storage_url) > 20, 90)
    running.kill()
    live = [t for t in load(storage_url).trials if not t.state.is_finished()]
    reported = {t.number: dict(t.intermediate_values) for t in load(storage_url).trials}
    assert live
    done = cli(*command(storage_url))
    assert done.returncode == 0, done.stderr
    for trial in check_finished(storage_url):
        before = reported.get(trial.number, {})
        assert {k: trial.intermediate_values[k] for k in before} == before
        if key(trial) in reference:
            assert trial.value == reference[key(trial)]
    check_leases(storage_url)
    for trial in json.loads(done.stdout)["trials"]:
        assert EPOCHS <= trial["units"] <= EPOCHS + 1


def reports(storage: str) -> int:
    """Values reported until now; read beside Optuna, which would make tables that are missing."""
    path = storage.removeprefix("sqlite:///")
    try:
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            rows = database.execute("select count(*) from trial_intermediate_values")
            return int(rows.fetchone()[0])
    except sqlite3.OperationalError:
        return 0


def test_ctrl_c_suspends_and_the_same_command_goes_on(
    start_cli: StartCli, cli: Cli, storage_url: str, wait_for: Callable[..., Any]
) -> None:
    """SIGINT parks every live trial within 10 s and says how to go on; going on works."""
    running = start_cli(*command(storage_url))
    wait_for(lambda: reports(storage_url) > 10, 90)
    running.send(signal.SIGINT)
    stopped = running.wait(12)
    assert stopped.returncode == 130
    assert "optimize" in stopped.stderr
    states = {trial["state"] for trial in json.loads(stopped.stdout)["trials"]}
    assert states <= {"COMPLETE", "STORED", "PENDING"}
    assert "STORED" in states
    done = cli(*command(storage_url))
    assert done.returncode == 0, done.stderr
    check_finished(storage_url)
    assert {trial["units"] for trial in json.loads(done.stdout)["trials"]} == {EPOCHS}


def test_a_timeout_suspends_what_is_left(cli: Cli, storage_url: str) -> None:
    """``--timeout`` ends with status 0, unfinished trials wait, and what goes on is said."""
    done = cli(*command(storage_url, f"{LIGHT}:objective", timeout=15, n_trials=400))
    assert done.returncode == 0, done.stderr
    states = [trial["state"] for trial in json.loads(done.stdout)["trials"]]
    assert set(states) <= {"COMPLETE", "STORED", "PENDING"}
    assert "to go on" in done.stderr.lower()
    assert re.search(r"The time is over: \d+\.\d s, \d+\.\d s of it until the", done.stderr), (
        done.stderr
    )


def test_a_timeout_counts_from_the_call(cli: Cli, storage_url: str, tmp_path: Path) -> None:
    """Also while the objective is imported: what the time was spent on is said."""
    (tmp_path / "slow.py").write_text("import threading\nthreading.Event().wait()\n")
    target = f"{tmp_path / 'slow.py'}:objective"
    study = ("--storage", storage_url, "--study-name", "s", "--json")
    done = cli("optimize", target, *study, "--timeout", 1, deadline_seconds=30)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["trials"] == []
    assert "in which the objective was not even imported" in done.stderr


def test_the_broker_stays_while_the_objective_is_imported(
    cli: Cli, start_cli: StartCli, storage_url: str, tmp_path: Path, wait_for: Callable[..., Any]
) -> None:
    """However long that takes: a pod whose probe finds no broker is ended and begins anew."""
    (tmp_path / "slow.py").write_text(
        "import time\nfrom pathlib import Path\nfrom light import objective\n"
        "while not Path('go').exists():\n    time.sleep(0.01)\n"
    )
    path = os.pathsep.join([str(LIGHT.parent), os.environ.get("PYTHONPATH", "")])
    env = {"OPTUNA_HERMES_BROKER_IDLE_SECONDS": "2", "PYTHONPATH": path}
    words = command(storage_url, f"{tmp_path / 'slow.py'}:objective", n_trials=1)
    running = start_cli(*words, env=env)
    wait_for(lambda: cli("status", "--probe").returncode == 0, 60)
    end = time.monotonic() + 4.0
    while time.monotonic() < end:
        probed = cli("status", "--probe")
        assert probed.returncode == 0, probed.stderr
    (tmp_path / "go").touch()
    assert running.wait().returncode == 0, running.stderr


def test_status_names_devices_holders_and_suspended_trials(
    start_cli: StartCli, cli: Cli, storage_url: str, wait_for: Callable[..., Any]
) -> None:
    """While a study runs ``status --json`` shows who trains where, and who waits."""
    running = start_cli(*command(storage_url, policy="round-robin", n_trials=100))

    def suspended() -> Any:
        broker = json.loads(cli("status", "--json").stdout)["broker"]
        runs = [run for study in broker["studies"] for run in study["trials"]] if broker else []
        return broker if any(run["state"] in ("parked", "stored") for run in runs) else None

    broker = wait_for(suspended, 90)
    assert {device["id"] for device in broker["devices"]} == {"cpu:0", "cpu:1"}
    holders = [device["holder"] for device in broker["devices"] if device["holder"]]
    assert holders
    assert all(holder["study"] == "s" for holder in holders)
    running.kill()


def test_a_killed_broker_costs_nothing(
    start_cli: StartCli, storage_url: str, runtime_dir: Path, wait_for: Callable[..., Any]
) -> None:
    """All train on when the broker dies, under the next one: no unit is trained again."""
    running = start_cli(*command(storage_url))
    wait_for(lambda: reports(storage_url) > 10, 90)
    os.kill(json.loads((runtime_dir / "broker.json").read_text())["pid"], signal.SIGKILL)
    done = running.wait()
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    check_finished(storage_url)
    check_leases(storage_url)
    assert {trial["units"] for trial in json.loads(done.stdout)["trials"]} == {EPOCHS}


@pytest.mark.slow  # shorter trials go on in test_unheard_checkpoints, and in test_ends_of_trials
def test_a_killed_worker_is_replaced(
    start_cli: StartCli, cli: Cli, storage_url: str, wait_for: Callable[..., Any]
) -> None:
    """A worker that dies gives its device back, and its trial goes on from its checkpoint."""
    running = start_cli(*command(storage_url))
    wait_for(lambda: reports(storage_url) > 10, 90)

    def holder() -> Any:
        broker = json.loads(cli("status", "--json").stdout)["broker"]
        return next((device["holder"] for device in broker["devices"] if device["holder"]), None)

    os.kill(wait_for(holder)["pid"], signal.SIGKILL)
    done = running.wait()
    assert done.returncode == 0, done.stderr
    check_finished(storage_url)
    check_leases(storage_url)


def test_a_trial_that_optuna_knows_to_be_finished_is_over(cli: Cli, storage_url: str) -> None:
    """A worker that dies between telling Optuna and telling the broker costs nothing."""
    done = cli(*command(storage_url, "told_and_died", n_trials=2))
    assert done.returncode == 0, done.stderr
    trials = json.loads(done.stdout)["trials"]
    assert [(trial["state"], trial["value"]) for trial in trials] == [("COMPLETE", 0.5)] * 2
    assert len(check_leases(storage_url)) == 4


def test_a_worker_that_dies_as_it_opens_a_trial_loses_none(
    cli: Cli, storage_url: str, tmp_path: Path
) -> None:
    """The next worker that opens one finds it: none is left over, and there is none too many."""
    file = tmp_path / "dying.py"
    file.write_text(f"import sys; sys.path.append({str(TINY.parent)!r})\n{DYING}")
    done = cli(*command(storage_url, f"{file}:objective", n_trials=4))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "died").exists()
    states = [trial["state"] for trial in json.loads(done.stdout)["trials"]]
    assert states == ["COMPLETE"] * 4
    check_leases(storage_url)


@pytest.mark.slow  # the rules are in test_broker_memory
def test_a_trial_that_outgrows_its_memory_is_tried_again_alone(
    cli: Cli, storage_url: str, tmp_path: Path
) -> None:
    """Beside others it is put back, with the device to itself it trains or fails for good."""
    options: dict[str, Any] = {"n_trials": 3, "devices": "cpu:1", "policy": "round-robin"}
    done = cli(*command(storage_url, "hungry", **options))
    assert done.returncode == 0, done.stderr
    states = [trial["state"] for trial in json.loads(done.stdout)["trials"]]
    assert states == ["COMPLETE", "COMPLETE", "FAIL"]
    assert (tmp_path / "attempts-2").read_text() == "xx"
    with ledger_of(storage_url) as ledger:
        events = ledger.load_events(_optuna.study_key(load(storage_url)))
    outgrown = [event for event in events if event.kind == "outgrew its memory"]
    assert sorted(event.number for event in outgrown) == [1, 2]
    for event in outgrown:
        known = f"Trial {event.number} outgrew its memory on cpu:0"
        assert known in event.detail["reason"]
    check_leases(storage_url)


@pytest.mark.slow  # test_ends_of_trials has more ways to fail
def test_only_the_trial_whose_code_raised_has_failed(cli: Cli, storage_url: str) -> None:
    """An exception in the objective fails its own trial, and the study goes on."""
    done = cli(*command(storage_url, "failing", n_trials=3))
    assert done.returncode == 0, done.stderr
    states = [trial["state"] for trial in json.loads(done.stdout)["trials"]]
    assert states == ["COMPLETE", "FAIL", "COMPLETE"]


@pytest.mark.slow  # as those of test_ends_of_trials
def test_an_objective_without_the_callback_waits_in_memory(cli: Cli, storage_url: str) -> None:
    """A loop that only asks ``should_prune`` takes turns too."""
    done = cli(*command(storage_url, "only_reports", n_trials=6))
    assert done.returncode == 0, done.stderr
    assert {trial["state"] for trial in json.loads(done.stdout)["trials"]} == {"COMPLETE"}


def test_a_metric_that_is_not_logged_is_said_with_the_names_there_are(
    cli: Cli, storage_url: str
) -> None:
    """The run stops with status 2 after one epoch, and no trial has failed for it."""
    done = cli(*command(storage_url, "misnamed"))
    assert done.returncode == 2
    assert "val_loss" in done.stderr
    assert "accuracy" in done.stderr
    assert "Traceback" not in done.stderr
    assert all(trial.state == TrialState.RUNNING for trial in load(storage_url).trials)


def test_a_damaged_checkpoint_is_never_a_silent_restart(
    start_cli: StartCli, cli: Cli, storage_url: str, wait_for: Callable[..., Any]
) -> None:
    """With every checkpoint of a trial cut short the command names trial and file, status 2."""
    running = start_cli(*command(storage_url))
    wait_for(lambda: reports(storage_url) > 10, 90)
    running.send(signal.SIGINT)
    running.wait(12)
    with ledger_of(storage_url) as ledger:
        runs = ledger.load_trials(_optuna.study_key(load(storage_url)))
        stored = [run.number for run in runs if run.state == "stored"]
        saved = ledger.load_checkpoints(_optuna.study_key(load(storage_url)))
    for record in saved:
        if record.number in stored and Path(record.checkpoint.path).exists():
            os.truncate(record.checkpoint.path, 100)
    done = cli(*command(storage_url))
    assert done.returncode == 2
    assert "heckpoint" in done.stderr
    assert any(f"trial-{number:05d}" in done.stderr for number in stored)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"policy": "astrology"}, ["astrology", "hermes"]),
        ({"devices": "cpu:0"}, ["cpu:0"]),
        ({"devices": "tpu:1"}, ["tpu:1"]),
        ({"name": "nowhere.py:objective"}, ["nowhere.py"]),
        ({"name": f"{LIGHT}:nothing"}, ["nothing", "objective"]),
        ({"name": "no_such_module:f"}, ["no_such_module"]),
        ({"name": "train.py:"}, ["FILE.py:NAME"]),
        ({"storage": "sqlite:////dev/null/folder/s.db"}, ["/dev/null/folder"]),
        ({"storage": "oracle://me:secret@localhost:1/x"}, ["localhost"]),
    ],
)
def test_bad_input_is_one_line(
    cli: Cli, storage_url: str, options: dict[str, Any], words: list[str]
) -> None:
    """Whatever is wrong is said in one line with status 2."""
    options = dict(options)
    storage = options.pop("storage", storage_url)
    done = cli(*command(storage, **options))
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    for word in words:
        assert word in errors[0]
    assert "secret" not in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_study_in_a_storage_with_others_is_refused(cli: Cli, storage_url: str) -> None:
    """A name that was misspelt does not quietly make a second study."""
    optuna.create_study(storage=storage_url, study_name="digits")
    done = cli(*command(storage_url))
    assert done.returncode == 2
    assert "digits" in done.stderr
    assert "create-study" in done.stderr
