"""``benchmarks/race.py``: what it makes of the lines that trainings write."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.benchmarks import benchmark

BEGUN = 1000.0
N_UNITS = 3


@pytest.fixture
def measure() -> Any:
    return benchmark("_race_measure")


@pytest.fixture
def comparison() -> Any:
    return benchmark("_race_compare")


def setting(contestant: str = "optuna", task: str = "t", seed: int = 0) -> dict[str, Any]:
    return {
        "task": task,
        "seed": seed,
        "contestant": contestant,
        "devices": 2,
        "seconds": 10.0,
        "unit_seconds": 1.0,
    }


def batch(trial: str, unit: int, begun: float, ended: float) -> list[Any]:
    return ["batch", trial, unit, BEGUN + begun, BEGUN + ended]


def value(trial: str, unit: int, number: float, at: float) -> list[Any]:
    return ["value", trial, unit, number, BEGUN + at]


def record(
    measure: Any,
    curves: dict[str, Sequence[tuple[int, float, float]]],
    contestant: str = "optuna",
    task: str = "t",
    seed: int = 0,
) -> Any:
    """A contest in which each trial had these units, values and times."""
    lines: list[list[Any]] = []
    for trial, points in curves.items():
        lines.append(["trial", trial, {"x": trial}, BEGUN + 0.5])
        for unit, number, at in points:
            lines += [batch(trial, unit, at - 1, at), value(trial, unit, number, at)]
    given = setting(contestant, task, seed)
    return measure.make_record(given, lines, begun=BEGUN, cpu_seconds=4.0, leases=None)


def test_batches_become_units_within_the_budget(measure: Any) -> None:
    """A unit's time is inside of its batches, and what comes after the budget is left out."""
    lines = [
        ["trial", "0", {"x": 1}, BEGUN],
        batch("0", 1, 2.0, 2.5),
        batch("0", 1, 3.0, 3.5),
        value("0", 1, 0.7, 3.6),
        batch("0", 2, 9.5, 11.0),
        value("0", 2, 0.1, 11.0),
        batch("0", 3, 11.0, 12.0),
        ["trial", "1", {"x": 2}, BEGUN + 11.0],
    ]
    found = measure.make_record(setting(), lines, begun=BEGUN, cpu_seconds=4.0, leases=None)
    assert [tuple(unit) for unit in found.units] == [
        ("0", 1, 2.0, 3.5, 1.0),
        ("0", 2, 9.5, 10.0, 0.5),
    ]
    assert [tuple(each) for each in found.values] == [("0", 1, 0.7, 3.6)]
    assert list(found.trials) == ["0"]
    figures = measure.figures(found, N_UNITS)
    assert figures["busy_share"] == pytest.approx(1.5 / (2 * (10.0 - 2.0)))
    assert (figures["units"], figures["begun"], figures["finished"]) == (1, 1, 0)
    assert (figures["first_batch"], figures["cpu_per_unit"]) == (2.0, 4.0)
    assert (figures["best"], figures["best_finished"]) == (0.7, None)
    assert figures["opening_wait"] is figures["decision_wait"] is None


def test_a_unit_trained_twice_counts_once(measure: Any) -> None:
    """Its first value is kept, and it is said how many had one before."""
    lines = [
        ["trial", "0", {}, BEGUN],
        value("0", 1, 0.5, 2.0),
        value("0", 1, 0.4, 3.0),
    ]
    found = measure.make_record(setting(), lines, begun=BEGUN, cpu_seconds=1.0, leases=None)
    assert [each.value for each in found.values] == [0.5]
    assert found.repeated == 1


def test_waits_are_those_of_each_lease(measure: Any) -> None:
    """A lease waits for its first batch, and a decision comes after the last value in a lease."""
    leases = [
        measure.Lease("0", BEGUN + 1.0, BEGUN + 4.25),
        measure.Lease("1", BEGUN + 4.5, BEGUN + 5.0),  # had no batch
        measure.Lease("0", BEGUN + 6.0, None),
    ]
    lines = [
        ["trial", "0", {}, BEGUN],
        batch("0", 1, 1.5, 2.0),
        value("0", 1, 0.5, 2.0),
        batch("0", 2, 2.1, 4.0),
        value("0", 2, 0.5, 4.0),
        batch("0", 3, 6.25, 7.0),
        value("0", 3, 0.5, 7.0),
    ]
    found = measure.make_record(setting(), lines, begun=BEGUN, cpu_seconds=1.0, leases=leases)
    assert found.opening_waits == [0.5, 0.25]
    assert found.decision_waits == [0.25]
    assert measure.figures(found, N_UNITS)["opening_wait"] == 0.375


def test_nothing_has_figures_too(measure: Any) -> None:
    """A contestant without a batch has no share, no best value and no cost of a unit."""
    found = measure.make_record(setting(), [], begun=BEGUN, cpu_seconds=3.0, leases=[])
    figures = measure.figures(found, N_UNITS)
    assert (figures["units"], figures["begun"]) == (0, 0)
    absent = ("busy_share", "cpu_per_unit", "first_batch", "best", "opening_wait")
    assert all(figures[name] is None for name in absent)


def test_a_record_comes_back_from_its_file(measure: Any) -> None:
    """JSON keeps every value, also one that is not a number."""
    found = record(measure, {"0": [(1, 0.1 + 0.2, 2.0), (2, math.nan, 3.0)]})
    again = measure.Record.of_json(json.loads(json.dumps(asdict(found))))
    assert again.values[0] == found.values[0]
    assert math.isnan(again.values[1].value)
    assert again.units == found.units


def test_equal_configurations_must_have_equal_values(measure: Any) -> None:
    """Units of the same parameters are compared bit for bit; not a number is equal to itself."""
    one = record(measure, {"0": [(1, 0.5, 2.0), (2, math.nan, 3.0)]})
    other = record(measure, {"0": [(1, math.nextafter(0.5, 1), 2.0), (2, math.nan, 3.0)]}, "b")
    assert measure.differing([one, other]) == {"compared": 2, "differing": 1}


def test_the_lowest_value_so_far_is_a_staircase(measure: Any, comparison: Any) -> None:
    """Only lower values are steps, of finished trials if these are asked for."""
    found = record(measure, {"0": [(1, 0.9, 2.0), (2, 0.4, 3.0), (3, 0.6, 4.0)]})
    steps = comparison.Steps(found, "any", N_UNITS)
    times = np.array([1.9, 2.0, 2.5, 3.0, 9.0])
    assert steps.at(times).tolist() == [math.inf, 0.9, 0.9, 0.4, 0.4]
    assert steps.reach(0.5) == 3.0
    assert steps.reach(0.3) is None
    assert comparison.Steps(found, "finished", N_UNITS).best == 0.6


def test_regret_is_between_the_lowest_and_the_median_first(measure: Any, comparison: Any) -> None:
    """A configuration that several trained counts once, and one that is not finite is a bad one."""
    one = record(measure, {"a": [(1, 1.0, 2.0), (2, 0.5, 3.0)], "b": [(1, 2.0, 2.0)]})
    other = record(measure, {"a": [(1, 1.0, 4.0)], "c": [(1, math.nan, 4.0)]}, "other")
    bounds = comparison.scale([one, other])
    assert bounds == (0.5, 2.0)
    values = np.array([0.5, 1.25, 2.0, 7.0, math.inf])
    assert comparison.regret(values, bounds).tolist() == [0.0, 0.5, 1.0, 1.0, 1.0]


def test_without_a_scale_only_the_lowest_has_no_regret(comparison: Any) -> None:
    """One configuration, or no value at all, divides nothing by zero."""
    assert comparison.regret(np.array([1.0, 2.0]), (1.0, 1.0)).tolist() == [0.0, 1.0]
    nothing = comparison.scale([])
    assert comparison.regret(np.array([math.inf]), nothing).tolist() == [1.0]


@pytest.fixture
def contests(measure: Any) -> dict[tuple[str, int], dict[str, Any]]:
    """Two tasks with three seeds: ``hermes`` is twice as fast, and the third has no value."""
    cells = {}
    for task in ("s", "t"):
        for seed in range(3):
            slow = {"0": [(1, 1.0, 2.0), (2, 0.6, 4.0), (3, 0.5 - seed / 10, 8.0)]}
            fast = {"0": [(1, 1.0, 2.0), (2, 0.5 - seed / 10, 4.0)], "1": [(1, 0.1, 9.0)]}
            cells[task, seed] = {
                "optuna": record(measure, slow, "optuna", task, seed),
                "hermes": record(measure, fast, "hermes", task, seed),
                "ray-asha": record(measure, {}, "ray-asha", task, seed),
            }
    return cells


def test_speed_up_is_against_the_reference_s_last_best(comparison: Any, contests: Any) -> None:
    """It is the ratio of the times; who never gets there counts with the budget, and is named."""
    rows = comparison.compare(contests, ["optuna", "hermes", "ray-asha"], N_UNITS)["rows"]
    ours = rows["hermes"]["speed_up"]
    assert ours["any"]["mean"] == ours["any"]["low"] == pytest.approx(2.0)
    assert ours["any"]["never"] == 0
    assert ours["finished"]["mean"] == pytest.approx(8.0 / 10.0)
    assert ours["finished"]["never"] == 6
    assert rows["optuna"]["speed_up"]["any"]["mean"] == pytest.approx(1.0)
    assert rows["ray-asha"]["speed_up"]["any"]["never"] == 6


def test_a_reference_that_finishes_nothing_counts_with_the_budget(
    measure: Any, comparison: Any
) -> None:
    """Any finished trial is as good as none, and its time is compared with the budget."""
    cells = {
        ("t", 0): {
            "optuna": record(measure, {"0": [(1, 1.0, 2.0)]}),
            "hermes": record(measure, {"0": [(3, 1.0, 5.0)]}, "hermes"),
        }
    }
    rows = comparison.compare(cells, ["optuna", "hermes"], N_UNITS)["rows"]
    assert rows["hermes"]["speed_up"]["finished"]["mean"] == pytest.approx(2.0)
    assert rows["optuna"]["speed_up"]["finished"]["mean"] == pytest.approx(1.0)


def test_regret_at_the_end_is_paired_and_tested(comparison: Any, contests: Any) -> None:
    """A contestant without a value has regret 1 in each cell, and is not dropped."""
    rows = comparison.compare(contests, ["optuna", "hermes", "ray-asha"], N_UNITS)["rows"]
    assert rows["hermes"]["regret"]["any"]["mean"] == 0.0
    assert list(rows["ray-asha"]["regret"]["any"].values()) == pytest.approx([1.0, 1.0, 1.0])
    assert rows["ray-asha"]["contests"] == 6
    assert rows["hermes"]["p"]["any"] is None
    assert rows["ray-asha"]["p"]["any"] == pytest.approx(1 / 2**6)
    assert rows["ray-asha"]["p"]["finished"] == 1.0  # neither finished a trial


def test_curves_begin_at_either_origin(comparison: Any, contests: Any) -> None:
    """From the first batch on, each contest has its own zero."""
    found = comparison.compare(contests, ["optuna", "hermes"], N_UNITS)
    grids, curves = found["grids"], found["rows"]["optuna"]["curves"]
    assert grids["from the start"][-1] == 10.0
    assert grids["from the first batch"][-1] == 9.0  # they all begin after a second
    from_start = dict(
        zip(grids["from the start"], curves["any, from the start"]["mean"], strict=True)
    )
    assert from_start[1.0] == 1.0
    low = curves["any, from the first batch"]
    assert all(
        least <= mean <= most
        for least, mean, most in zip(low["low"], low["mean"], low["high"], strict=True)
    )
    # What is known 4 s after the start is known 3 s after the first batch.
    first = np.interp(3.01, grids["from the first batch"], low["mean"])
    assert first == pytest.approx(
        np.interp(4.06, grids["from the start"], curves["any, from the start"]["mean"])
    )


def test_resamples_keep_tasks_and_seeds_together(comparison: Any) -> None:
    """Weights of each resample add up to one, and whole tasks are left out of some."""
    cells = [("s", 0), *(("t", seed) for seed in range(3))]
    weights = comparison.resample(cells)
    assert weights.sum(axis=1) == pytest.approx(np.ones(len(weights)))
    assert weights.min() >= 0
    assert np.any(weights[:, 0] == 0)
    assert np.any(weights[:, 1:].sum(axis=1) == 0)
    assert np.array_equal(weights, comparison.resample(cells))


def test_report_names_every_contestant(measure: Any, comparison: Any, contests: Any) -> None:
    """Each has a line in both tables, and a cell for each task and seed in the third."""
    names = ["optuna", "hermes", "ray-asha"]
    records = [each for cell in contests.values() for each in cell.values()]
    result = {
        "setting": {"seconds": 10},
        "contests": [
            {**each.setting, "figures": measure.figures(each, N_UNITS)} for each in records
        ],
        "exactness": measure.differing(records),
        "comparison": comparison.compare(contests, names, N_UNITS),
    }
    written = benchmark("_race_report").text(result)
    for name in names:
        assert sum(line.startswith(f"| `{name}` |") for line in written.splitlines()) == 2
    assert "| s | 0 | 0.5 (0.5) | 0.1 (none) | none (none) |" in written


def test_first_configurations_follow_from_task_and_seed() -> None:
    """They are the same for all contestants, others for other seeds, and within the ranges."""
    tasks = benchmark("_race_tasks")
    space = {
        "lr": tasks.Range(low=1e-4, high=1e-1, log=True),
        "width": tasks.Range(low=4, high=6, whole=True),
    }

    def first(**given: Any) -> list[dict[str, Any]]:
        base = {**setting(), "folder": "", **given}
        found: list[dict[str, Any]] = tasks.first_configurations(space, tasks.Contest(**base))
        return found

    assert first() == first(contestant="hermes")
    assert first() != first(seed=1)
    assert first() != first(task="other")
    for each in first():
        assert 1e-4 <= each["lr"] <= 1e-1
        assert each["width"] in (4, 5, 6)
        assert tasks.digest(each) == tasks.digest(dict(reversed(each.items())))


def test_half_a_line_of_a_killed_process_is_left_out(tmp_path: Path) -> None:
    """All whole lines of all processes are read."""
    (tmp_path / "watch-1.jsonl").write_text('["trial", "0", {}, 1.0]\n["value", "0", 1,')
    (tmp_path / "watch-2.jsonl").write_text('["value", "0", 1, NaN, 2.0]\n')
    lines = list(benchmark("_race_watch").read_lines(tmp_path))
    assert [line[0] for line in lines] == ["trial", "value"]
