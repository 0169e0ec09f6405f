"""Curve sets from files and studies, simulations over all of them, and the table."""

from __future__ import annotations

import doctest
import io
import math
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import psutil
import pytest
from optuna.trial import TrialState
from rich.console import Console

from optuna_hermes import _optuna
from optuna_hermes.errors import HermesError, InvalidInputError, UnknownPolicyError
from optuna_hermes.ledger import Ledger, ReportRecord, open_ledger
from optuna_hermes.policies import check_simulated_policy
from optuna_hermes.replay import (
    REFERENCES,
    Result,
    SimulationRules,
    check_names,
    curve_set_of,
    incomplete_trials,
    read_curve_set,
    simulate_one,
    tabulate,
)
from optuna_hermes.replay._processes import parallel_map
from optuna_hermes.simulator import RIVALS, CurveSet, Metrics, Recording
from optuna_hermes.view import simulation


def arrays(**changes: Any) -> dict[str, Any]:
    """The arrays of a set of two trials, of two and of three units."""
    good = {
        "value": np.array([[9.0, 3.0, 2.0, np.nan], [9.0, 5.0, 4.0, 1.0]], dtype=np.float32),
        "seconds": np.array([[1.0, 2.0, np.nan], [1.0, 1.0, 1.0]], dtype=np.float32),
        "length": np.array([2, 3], dtype=np.int32),
        "params": np.array([[0.1, 1.0], [0.2, 0.0]]),
        "param_names": np.array(["net:lr", "kind:a|b"]),
        "meta": np.array('{"name": "task", "family": "tiny"}'),
    }
    return {key: value for key, value in {**good, **changes}.items() if value is not None}


def saved(folder: Path, **changes: Any) -> Path:
    path = folder / "set.npz"
    np.savez(path, **arrays(**changes))
    return path


# -- files -------------------------------------------------------------------------------------


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_file_is_read(save: Callable[..., None], tmp_path: Path) -> None:
    """Each trial has as many units as its length says, and its parameters."""
    save(tmp_path / "set.npz", **arrays())
    found = read_curve_set(tmp_path / "set.npz")
    assert (found.name, found.family) == ("task", "tiny")
    first, second = found.recordings
    assert first.values == (3.0, 2.0)
    assert first.seconds == (1.0, 2.0)
    assert first.first == 9.0
    assert second.values == (5.0, 4.0, 1.0)
    assert [each.params for each in found.recordings] == [
        {"net:lr": 0.1, "kind": "b"},
        {"net:lr": 0.2, "kind": "a"},
    ]


def _zip(path: Path, name: str, content: bytes) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, content)


def _array(path: Path) -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(3))
    path.write_bytes(buffer.getvalue())


def _cut(path: Path) -> None:
    np.savez(path, **arrays())
    path.write_bytes(path.read_bytes()[:-40])


def _damaged(path: Path) -> None:
    np.savez_compressed(path, **arrays(value=np.random.default_rng(0).random((2, 4))))
    content = bytearray(path.read_bytes())
    content[80:120] = bytes(40)
    path.write_bytes(content)


WRONG_FILES: dict[str, Callable[[Path], object]] = {
    "text": lambda path: path.write_text("loss,epoch\n"),
    "nothing": lambda path: path.write_bytes(b""),
    "folder": lambda path: path.mkdir(),
    "missing": lambda path: path,
    "other zip": lambda path: _zip(path, "letter.txt", b"Dear all"),
    "zip of bytes": lambda path: _zip(path, "value", b"0.1 0.2"),
    "one array": _array,
    "cut short": _cut,
    "damaged": _damaged,
}


@pytest.mark.parametrize("kind", WRONG_FILES)
def test_a_wrong_file_is_named(kind: str, tmp_path: Path) -> None:
    """A file that is no curve set is an error in one line with the file's name."""
    path = tmp_path / "x.npz"
    WRONG_FILES[kind](path)
    with pytest.raises(InvalidInputError, match=r"x\.npz") as caught:
        read_curve_set(path)
    assert "\n" not in str(caught.value)


class Trap:
    """Tells whether it was unpickled."""

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return pytest.fail, ("A file was unpickled.",)


NO_UNIT = {"value": np.ones((2, 1)), "seconds": np.ones((2, 0)), "length": np.ones(2)}

WRONG_ARRAYS: dict[str, dict[str, Any]] = {
    "pickled": {"value": np.array([Trap(), Trap()], dtype=object)},
    "no value": {"value": None},
    "NaN only": {"value": np.full((2, 4), np.nan)},
    "trial without a unit": {"length": np.array([0, 3])},
    "set without a unit": NO_UNIT,
    "set without a trial": {
        "value": np.ones((0, 4)),
        "seconds": np.ones((0, 3)),
        "length": np.ones(0),
    },
    "words as values": {"value": np.array([["a"] * 4] * 2)},
    "words as lengths": {"length": np.array(["two", "three"])},
    "NaN as a length": {"length": np.array([2.0, np.nan])},
    "flat values": {"value": np.ones(4)},
    "params of one trial": {"params": np.ones((1, 2))},
    "a choice that is none": {"params": np.array([[0.1, 2.0], [0.2, 0.0]])},
    "params without names": {"param_names": np.array(["lr"])},
    "meta that is no JSON": {"meta": np.array("name: task")},
    "meta that is a list": {"meta": np.array("[]")},
}


@pytest.mark.parametrize("kind", WRONG_ARRAYS)
def test_wrong_arrays_are_refused(kind: str, tmp_path: Path) -> None:
    """An .npz file that holds something else is an error in one line, and nothing is unpickled."""
    path = saved(tmp_path, **WRONG_ARRAYS[kind])
    with pytest.raises(InvalidInputError, match=r"set\.npz") as caught:
        read_curve_set(path)
    assert "\n" not in str(caught.value)


def test_the_given_curves_are_read() -> None:
    """Every file of the folder that is given through the environment is a curve set."""
    folder = os.environ.get("OPTUNA_HERMES_CURVES")
    if not folder or not Path(folder).is_dir():
        pytest.skip("OPTUNA_HERMES_CURVES names no folder with curves")
    found = [read_curve_set(path) for path in sorted(Path(folder).glob("*.npz"))]
    assert found
    assert len({each.name for each in found}) == len(found)
    assert all(each.recordings[0].params for each in found)


# -- studies -----------------------------------------------------------------------------------


class House:
    """A study with its ledger, where trials report a value every two device seconds."""

    def __init__(self, url: str, direction: str) -> None:
        self.study = optuna.create_study(storage=url, study_name="mine", direction=direction)
        self.sign = _optuna.sign(self.study)
        self.ledger: Ledger = open_ledger(_optuna.ledger_url(self.study))

    def train(self, *values: float, state: TrialState | None, seconds: float = 2.0) -> int:
        """A trial as the broker keeps it; None for a state leaves it unfinished."""
        trial = self.study.ask({"x": optuna.distributions.FloatDistribution(0, 1)})
        for unit, value in enumerate(values, 1):
            self.ledger.add_report(
                ReportRecord(
                    study=_optuna.study_key(self.study),
                    number=trial.number,
                    unit=unit,
                    step=unit,
                    value=self.sign * value,
                    device_seconds=seconds * unit,
                    at=0.0,
                )
            )
        if state is not None:
            value_or_none = values[-1] if state == TrialState.COMPLETE else None
            self.study.tell(trial, value_or_none, state=state)
        return trial.number


@pytest.fixture(params=["minimize", "maximize"])
def house(request: pytest.FixtureRequest, storage_url: str) -> Iterator[House]:
    """A study of either direction."""
    found = House(storage_url, request.param)
    yield found
    found.ledger.close()


def test_a_study_is_a_curve_set(house: House) -> None:
    """Units have the device time between two reports, and lower is better in either direction."""
    house.train(0.5, 0.25, state=TrialState.COMPLETE)
    found = curve_set_of(house.study, house.ledger)
    (recording,) = found.recordings
    assert found.name == "mine"
    assert recording.values == (house.sign * 0.5, house.sign * 0.25)
    assert recording.seconds == (2.0, 2.0)
    assert math.isnan(recording.first)
    assert recording.params == house.study.trials[0].params
    assert incomplete_trials(house.study, house.ledger) == ((), ())


def test_trials_that_were_cut_short_are_named(house: House) -> None:
    """Suspended and pruned trials end where they were trained; failed and silent ones are out."""
    house.train(0.5, 0.4, 0.3, state=TrialState.COMPLETE)
    failed = house.train(0.5, state=TrialState.FAIL)
    suspended = house.train(0.5, 0.4, state=None)
    silent = house.train(state=None)
    pruned = house.train(0.7, state=TrialState.PRUNED)
    house.study.enqueue_trial({"x": 0.5})
    found = curve_set_of(house.study, house.ledger)
    assert [len(each.values) for each in found.recordings] == [3, 2, 1]
    cut, left_out = incomplete_trials(house.study, house.ledger)
    assert cut == (suspended, pruned)
    assert left_out == (failed, silent)


def test_reports_at_one_moment_are_units_all_the_same(house: House) -> None:
    """A unit in which the clock saw no time pass is as short as can be."""
    house.train(0.5, 0.4, state=TrialState.COMPLETE, seconds=0.0)
    (recording,) = curve_set_of(house.study, house.ledger).recordings
    assert min(recording.seconds) > 0


@pytest.mark.parametrize("values", [(), (math.nan,), (math.inf, math.inf)])
def test_a_study_without_a_value_is_refused(house: House, values: tuple[float, ...]) -> None:
    """Without a finite last value there is no best trial to wait for."""
    house.train(*values, state=None)
    with pytest.raises(InvalidInputError, match="'mine' has no trial with a finite value"):
        curve_set_of(house.study, house.ledger)


# -- simulations -------------------------------------------------------------------------------


def tiny(name: str = "tiny", family: str = "family", n: int = 6) -> CurveSet:
    """Trials of three units of one second; the one that begins worst ends best."""
    return CurveSet(
        name=name,
        family=family,
        recordings=tuple(
            Recording(values=(1.0 + i, 5.0, 10.0 - i), seconds=(1.0, 1.0, 1.0), first=20.0)
            for i in range(n)
        ),
    )


def test_the_draw_is_that_of_the_rules() -> None:
    """fifo finishes the best trial where ``default_rng(seed).choice`` has put it."""
    order = np.random.default_rng(7).choice(6, 4, replace=False).tolist()
    rules = SimulationRules(n_trials=4, switch_cost=0.5)
    found = simulate_one([tiny()], rules, (0, "fifo", 7))
    assert found.metrics.best_seconds == 3.5 * (1 + order.index(max(order)))
    assert found.metrics.work_seconds == 12.0
    assert found.metrics.switches == 4


def test_the_oracle_trains_the_best_trial_first() -> None:
    """The list is put into the order in which the oracle would open it."""
    found = simulate_one([tiny()], SimulationRules(switch_cost=0.0), (0, "oracle", 1))
    assert found.metrics.best_seconds == 3.0


def test_processes_change_nothing() -> None:
    """Two processes find what one finds, and say after each simulation that it is done."""
    steps: list[None] = []
    simulate = partial(simulate_one, [tiny()], SimulationRules(n_devices=2))
    jobs = [(0, policy, seed) for policy in ("fifo", "hermes") for seed in range(3)]
    alone = parallel_map(simulate, jobs, processes=1)
    shared = parallel_map(simulate, jobs, processes=2, on_answer=lambda: steps.append(None))
    assert shared == alone
    assert len(steps) == 6


def test_what_is_raised_in_a_process_is_raised_here() -> None:
    """A job that fails is not lost, wherever it runs."""
    for processes in (1, 2):
        with pytest.raises(ZeroDivisionError):
            parallel_map(lambda job: 1 // job, [1, 0, 2], processes=processes)


def test_a_process_that_is_killed_is_an_error_in_a_line() -> None:
    """As by a system that is short of memory; the others end too."""
    with pytest.raises(HermesError, match="One of 2 processes that compute was killed"):
        parallel_map(lambda job: os.kill(os.getpid(), signal.SIGKILL), [0, 1], processes=2)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_processes_end_with_the_one_that_started_them(
    how: signal.Signals, wait_for: Callable[..., Any]
) -> None:
    """Whatever kills it: they would wait for jobs for ever, with all curve sets in memory."""
    script = (
        "import time\n"
        "from optuna_hermes.replay._processes import parallel_map\n"
        "parallel_map(lambda job: print(flush=True) or time.sleep(600), [0, 1], processes=2)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as parent:
        assert parent.stdout
        assert [parent.stdout.readline(), parent.stdout.readline()] == [b"\n", b"\n"]
        children = psutil.Process(parent.pid).children()
        assert len(children) == 2
        parent.send_signal(how)
        parent.wait()
        try:
            wait_for(lambda: not any(map(_lives, children)), message="they have ended")
        finally:
            for child in filter(_lives, children):
                child.kill()


def _lives(process: psutil.Process) -> bool:
    """True if a process lives and is no zombie, which nobody may have waited for."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_answers_are_in_the_order_of_the_jobs() -> None:
    """Whichever process is done first."""
    jobs = [300_000, 10, 20, 30]
    assert parallel_map(lambda n: sum(range(n)), jobs, processes=2) == [sum(range(n)) for n in jobs]


def test_a_process_computes_with_one_thread() -> None:
    """There is one for each core: libraries loaded before the fork and after it have one thread."""
    script = (
        "import numpy, threadpoolctl\n"
        "from optuna_hermes.replay._processes import parallel_map\n"
        "def threads(job):\n"
        "    import scipy.linalg\n"
        "    return [each['num_threads'] for each in threadpoolctl.threadpool_info()]\n"
        "print({each for found in parallel_map(threads, [0, 1], processes=2) for each in found})\n"
    )
    env = {**os.environ, "OMP_NUM_THREADS": "2"}
    run = [sys.executable, "-c", script]
    done = subprocess.run(run, capture_output=True, text=True, check=True, env=env)
    assert done.stdout == "{1}\n"


def test_a_draw_of_no_trials_is_refused() -> None:
    """The error has the value."""
    with pytest.raises(InvalidInputError, match="a trial at least but got 0"):
        SimulationRules(n_trials=0)


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ({"n_devices": 0}, "got 0"),
        ({"switch_cost": -0.1}, "got -0.1"),
        ({"switch_cost": math.nan}, "got nan"),
    ],
)
def test_rules_that_cannot_be_are_refused(rules: dict[str, Any], says: str) -> None:
    """The simulator's own error has the value."""
    with pytest.raises(InvalidInputError, match=says):
        simulate_one([tiny()], SimulationRules(**rules), (0, "fifo", 0))


def test_an_unknown_policy_is_answered_with_all_there_are() -> None:
    """Those that trial live, and those that only the simulator has."""
    with pytest.raises(UnknownPolicyError, match=r"hermes, .*oracle.* but got 'best'"):
        check_simulated_policy("best", RIVALS)
    with pytest.raises(UnknownPolicyError, match=r"did you mean 'oracle'\?$"):
        check_simulated_policy("oracel", RIVALS)
    with pytest.raises(UnknownPolicyError, match=r"no device .* 'energy:las': name 'las' alone\.$"):
        check_simulated_policy("energy:las", RIVALS)


def test_sets_of_one_name_are_refused() -> None:
    """Their figures could not be told apart."""
    with pytest.raises(InvalidInputError, match="2 are called 'a'"):
        check_names([tiny("a"), tiny("b"), tiny("a")])


# -- the table ---------------------------------------------------------------------------------


def result(policy: str, best: float, **changes: Any) -> Result:
    """Of a simulation in which everything happened at one time."""
    words = {"curve_set": "a", "family": "f", "seed": 0, "auc": 0.5, "killed": False, **changes}
    return Result(
        curve_set=words["curve_set"],
        family=words["family"],
        policy=policy,
        seed=words["seed"],
        metrics=Metrics(
            best_seconds=best,
            top3_seconds=best,
            near_seconds=best,
            auc=words["auc"],
            work_seconds=100.0,
            switches=words.get("switches", 10),
            killed_best=words["killed"],
        ),
    )


def test_means_are_geometric_over_sets_of_arithmetic_over_seeds() -> None:
    """Two seeds of 1 and 3 on one set and of 8 on the other make 4."""
    (row,) = tabulate(
        [
            result("fifo", 1.0, seed=0),
            result("fifo", 3.0, seed=1),
            result("fifo", 8.0, curve_set="b", seed=0),
            result("fifo", 8.0, curve_set="b", seed=1),
        ]
    )
    assert row["best_seconds"] == pytest.approx(4.0)
    assert row["ratios"] == {"fifo": dict.fromkeys(row["ratios"]["fifo"], pytest.approx(1.0))}


def test_ratios_say_how_many_times_as_long_the_reference_takes() -> None:
    """The soonest policy stands first, and each is compared with all references."""
    rows = tabulate([result("fifo", 6.0), result("oracle", 1.0), result("mine", 2.0)])
    assert [row["policy"] for row in rows] == ["oracle", "mine", "fifo"]
    mine = rows[1]
    assert mine["ratios"]["fifo"]["best_seconds"] == pytest.approx(3.0)
    assert mine["ratios"]["oracle"]["near_seconds"] == pytest.approx(0.5)
    assert "round-robin" not in mine["ratios"]


def test_kills_and_switches_are_plain_means() -> None:
    """One kill in four simulations is a quarter."""
    rows = tabulate(
        [result("stop", 9.0, seed=seed, killed=seed == 2, switches=seed) for seed in range(4)]
    )
    assert rows[0]["killed_best"] == 0.25
    assert rows[0]["switches"] == 1.5


def test_families_are_compared_each_by_itself() -> None:
    """A policy may win in one family and lose in the other."""
    rows = tabulate(
        [
            result("fifo", 4.0, curve_set="a", family="f"),
            result("fifo", 4.0, curve_set="b", family="g"),
            result("mine", 1.0, curve_set="a", family="f"),
            result("mine", 8.0, curve_set="b", family="g"),
        ]
    )
    (mine,) = (row for row in rows if row["policy"] == "mine")
    assert mine["families"] == {"f": pytest.approx(4.0), "g": pytest.approx(0.5)}


def test_a_mean_of_nothing_is_zero_and_has_no_ratio() -> None:
    """A policy that has no regret on one set has none in the geometric mean."""
    rows = tabulate([result("fifo", 4.0), result("mine", 1.0, auc=0.0)])
    assert rows[0]["auc"] == 0.0
    assert math.isnan(rows[0]["ratios"]["fifo"]["auc"])


# -- the view ----------------------------------------------------------------------------------


def document(rows: int, families: int) -> dict[str, Any]:
    """As the command makes it, with figures of all sizes."""
    compared = {"best_seconds": 123.4, "top3_seconds": 10.5, "near_seconds": 0.5, "auc": math.nan}
    return {
        "settings": {
            "sets": [
                {"name": f"set-{i}", "family": f"f{i}", "trials": 50} for i in range(families)
            ],
            "devices": 1,
            "trials": 100,
            "seeds": [0, 1],
            "switch_cost": 0.005,
        },
        "table": [
            {
                "policy": f"policy-number-{i}",
                "best_seconds": 5.0,
                "work_seconds": 100.0,
                "switches": 12345.6,
                "killed_best": 0.375,
                "ratios": {reference: compared for reference in REFERENCES},
                "families": {f"a-family-{i}": 2.0 + i for i in range(families)},
            }
            for i in range(rows)
        ],
    }


def drawn(document: dict[str, Any]) -> list[str]:
    console = Console(width=80, highlight=False)
    with console.capture() as capture:
        console.print(simulation.simulation_view(document))
    return capture.get().splitlines()


def test_a_line_for_each_policy_fits_80_columns() -> None:
    """No figure is wrapped or cut."""
    lines = drawn(document(rows=3, families=1))
    assert lines[:2] == [
        "set-0: 50 trials, 1 device, 2 seeds, switch cost 0.5 %",
        "To train them all takes 1:40 min.",
    ]
    (line,) = (line for line in lines if "policy-number-2" in line)
    assert line.split() == [
        *("policy-number-2", "5.0", "%", "123x", "10.5x", "0.50x", "-", "12346", "38", "%")
    ]
    assert max(map(len, lines)) <= 80


def test_the_title_says_of_how_many_trials_some_were_drawn() -> None:
    """Where not all are replayed."""
    large = document(rows=1, families=2)
    large["settings"]["sets"][0]["trials"] = 300
    assert drawn(large)[0].startswith("2 curve sets: 50 to 100 of 50 to 300 trials, 1 device")
    large["settings"]["sets"] = large["settings"]["sets"][:1]
    assert drawn(large)[0].startswith("set-0: 100 of 300 trials, 1 device")


@pytest.mark.parametrize(("families", "says"), [(1, None), (3, None), (6, "2 more families")])
def test_families_stand_side_by_side(families: int, says: str | None) -> None:
    """As many as fit; of others it is said where they are."""
    lines = drawn(document(rows=2, families=families))
    text = "\n".join(lines)
    assert ("by family" in text) == (families > 1)
    assert ("a-family-3" in text) == (families > 3)
    assert ("more famil" in text) == (says is not None)
    if says:
        assert says in text
    assert max(map(len, lines)) <= 80


def test_examples_of_the_view_hold() -> None:
    """The examples in its docstrings are true."""
    found = doctest.testmod(simulation)
    assert found.attempted
    assert not found.failed
