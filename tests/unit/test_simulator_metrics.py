"""The measures of a schedule, computed by hand, and the curve sets that are replayed."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from optuna_hermes.errors import InvalidInputError
from optuna_hermes.model import Decision, Snapshot
from optuna_hermes.policies import Policy, make_policy
from optuna_hermes.simulator import (
    CurveSet,
    FixedList,
    Metrics,
    Recording,
    SwitchCosts,
    Trace,
    TrialSimulator,
    measure,
)

TRIALS = (
    Recording(values=(9.5, 9.0), seconds=(1.0, 1.0), first=10.0),
    Recording(values=(8.0, 4.0), seconds=(1.0, 1.0), first=10.0),
    Recording(values=(6.0, 2.0), seconds=(1.0, 1.0), first=8.0),
    Recording(values=(7.0, 5.0), seconds=(1.0, 1.0), first=18.0),
)
"""The median first value is 10, the best final one 2: a span of 8, and near is 2.08."""


class PrunesAtOnce(Policy):
    """First in, first out, but nobody gets a second unit."""

    def decide(self, snapshot: Snapshot) -> Decision:
        decision = make_policy("fifo").decide(replace(snapshot, trials=()))
        waiting = [trial.number for trial in snapshot.trials if trial.state != "running"]
        return replace(decision, pruned=tuple(waiting))


def simulate(policy: Policy, n_devices: int = 1, fraction: float = 0.0) -> Trace:
    costs = SwitchCosts(fraction=fraction)
    return TrialSimulator(policy, FixedList(TRIALS), n_devices=n_devices, costs=costs).run()


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_trial_that_diverges_is_the_worst(value: float) -> None:
    """Whatever it reports, or ends with, is neither the best nor near it."""
    measured = []
    for last in (value, 1e9):
        diverged = Recording(values=(8.5, last), seconds=(1.0, 1.0), first=last)
        recordings = (diverged, *TRIALS)
        trace = TrialSimulator(
            make_policy("fifo"), FixedList(recordings), n_devices=1, costs=SwitchCosts(fraction=0.0)
        ).run()
        # The median of five first values, of four where the fifth is no number.
        measured.append(replace(measure(trace, recordings, 1), auc=0.0))
    assert measured[0] == measured[1]


def test_a_trial_that_diverges_is_none_of_the_best_three() -> None:
    """Also where fewer than three have a finite end."""
    diverged = Recording(values=(9.0, math.nan), seconds=(1.0, 1.0), first=10.0)
    recordings = (diverged, TRIALS[2])
    metrics = measure(
        TrialSimulator(make_policy("fifo"), FixedList(recordings), n_devices=1).run(), recordings, 1
    )
    assert metrics.top3_seconds == metrics.best_seconds > 3.0


class TestMeasure:
    """All of a small list."""

    def test_fifo_on_one_device(self) -> None:
        """Reports are 9.5, 9, 8, 4, 6, 2, 7, 5: the best seen after each gives the area."""
        metrics = measure(simulate(make_policy("fifo")), TRIALS, 1)
        assert metrics == Metrics(
            best_seconds=6.0,
            top3_seconds=4.0,
            near_seconds=6.0,
            # Regret 1 until the first report, then (best - 2) / 8; 0 from second 6 to 8.
            auc=(1 + 7.5 / 8 + 7 / 8 + 6 / 8 + 2 * 2 / 8) / 8,
            work_seconds=8.0,
            switches=4,
            killed_best=False,
        )

    def test_two_devices(self) -> None:
        """The whole work takes half as long, and the switch costs are no part of it."""
        metrics = measure(simulate(make_policy("fifo"), 2, fraction=0.5), TRIALS, 2)
        # Units end at 1.5 (9.5 and 8), 2.5 (9 and 4), 4 (6 and 7) and 5 (2 and 5).
        assert metrics.work_seconds == 4.0
        assert metrics.top3_seconds == 2.5
        assert metrics.best_seconds == metrics.near_seconds == 5.0
        assert metrics.switches == 4
        # At 4 the whole work is over: what comes then counts no more.
        assert metrics.auc == pytest.approx((1.5 + 6 / 8 + 1.5 * 2 / 8) / 4)

    def test_killing_the_best(self) -> None:
        """A policy that kills the best trial needs the whole work for it, and is told so."""
        trace = simulate(PrunesAtOnce())
        assert trace.finished == {}
        metrics = measure(trace, TRIALS, 1)
        assert metrics.killed_best
        assert metrics.best_seconds == metrics.top3_seconds == metrics.near_seconds == 8.0
        # 9.5, 8, 6, 7 after a second each; 6 is the best from second 3 on.
        assert metrics.auc == pytest.approx((1 + 7.5 / 8 + 6 / 8 + 5 * 4 / 8) / 8)

    def test_killing_the_best_with_a_device_each(self) -> None:
        """The work over the devices is less than any training takes: killing is not sooner."""
        trace = TrialSimulator(
            PrunesAtOnce(), FixedList(TRIALS[:3]), n_devices=4, costs=SwitchCosts(fraction=0.0)
        ).run()
        metrics = measure(trace, TRIALS[:3], 4)
        assert metrics.work_seconds == 1.5
        assert metrics.best_seconds == metrics.top3_seconds == metrics.near_seconds == 3.0

    @pytest.mark.parametrize("n_devices", [1, 2, 3])
    def test_killing_is_not_sooner_where_switches_are_dear(self, n_devices: int) -> None:
        """What never came counts as no sooner than any policy ends that trains all."""
        costs = SwitchCosts(fraction=1.0, seconds=0.5)
        pruned, trained = (
            TrialSimulator(policy, FixedList(TRIALS), n_devices=n_devices, costs=costs).run()
            for policy in (PrunesAtOnce(), make_policy("round-robin"))
        )
        never = measure(pruned, TRIALS, n_devices, costs).best_seconds
        assert never >= max(trained.finished.values()) > 8.0 / n_devices
        assert never == measure(pruned, TRIALS, n_devices, costs).near_seconds
        assert n_devices > 1 or never == 4 * (2 * 2.0 + 0.5)

    def test_one_of_three(self) -> None:
        """The end of one of the best three counts if it has finished, however late."""
        trace = replace(simulate(make_policy("fifo"), 4), finished={1: 9.0})
        assert measure(trace, TRIALS, 4).top3_seconds == 9.0

    def test_killing_another(self) -> None:
        """Trials that are pruned do not count as the best one's death."""
        trace = replace(simulate(make_policy("fifo")), pruned={0: 1.0})
        assert not measure(trace, TRIALS, 1).killed_best

    def test_near_counts_values_on_the_way(self) -> None:
        """A value within 1 % of the span counts, though its trial ends worse."""
        trials = [
            Recording(values=(2.08, 5.0), seconds=(1.0, 1.0), first=10.0),
            Recording(values=(9.0, 2.0), seconds=(1.0, 1.0), first=10.0),
        ]
        trace = TrialSimulator(make_policy("fifo"), FixedList(trials)).run()
        assert measure(trace, trials, 1).near_seconds == 1.0
        assert measure(trace, trials, 1).best_seconds == 4.0

    def test_of_equal_trials_the_first_is_the_best(self) -> None:
        """Between equal final values the earlier trial counts."""
        trials = [Recording(values=(1.0,), seconds=(1.0,), first=2.0)] * 3
        trace = TrialSimulator(make_policy("fifo"), FixedList(trials)).run()
        assert measure(trace, trials, 1).best_seconds == 1.0

    def test_values_that_are_not_numbers(self) -> None:
        """NaN is never the best, neither as a final value nor on the way."""
        trials = [
            Recording(values=(math.nan, math.nan), seconds=(1.0, 1.0), first=4.0),
            Recording(values=(math.inf, 2.0), seconds=(1.0, 1.0), first=4.0),
        ]
        trace = TrialSimulator(make_policy("fifo"), FixedList(trials)).run()
        metrics = measure(trace, trials, 1)
        assert (metrics.best_seconds, metrics.near_seconds, metrics.auc) == (4.0, 4.0, 1.0)

    def test_no_span(self) -> None:
        """The first report counts where the best final value is no better than the first ones."""
        trials = [Recording(values=(3.0, 3.0), seconds=(1.0, 1.0), first=3.0)] * 2
        trace = TrialSimulator(make_policy("fifo"), FixedList(trials)).run()
        metrics = measure(trace, trials, 1)
        assert metrics.near_seconds == 1.0
        assert 0 <= metrics.auc <= 1

    def test_first_values_unknown(self) -> None:
        """Without values from before training the span begins at the first reports."""
        trials = [replace(each, first=math.nan) for each in TRIALS]
        # Reports after one unit: median 7.5, so the span is 5.5 and 2.055 is near.
        trace = TrialSimulator(make_policy("fifo"), FixedList(trials)).run()
        metrics = measure(trace, trials, 1)
        # The best seen is 4 in seconds 4 to 6, and above the median before that.
        assert metrics.auc == pytest.approx((4 + 2 * 2 / 5.5) / 8)


def arrays(**changed: Any) -> dict[str, Any]:
    """Two trials, the second one of a single unit."""
    found = {
        "value": np.array([[3.0, 2.0, 1.0], [4.0, 5.0, np.nan]]),
        "seconds": np.array([[1.0, 2.0], [0.5, np.nan]]),
        "length": np.array([2, 1]),
        "params": np.array([[0.1, 0.0], [0.2, 1.0]]),
        "param_names": np.array(["lr", "optimizer:sgd|adam"]),
        "meta": np.array(json.dumps({"name": "digits", "family": "small"})),
        **changed,
    }
    return {key: value for key, value in found.items() if value is not None}


class TestCurveSet:
    """Curve sets out of arrays."""

    def test_from_arrays(self) -> None:
        """Column 0 is the value before training, and each trial has as many units as its length."""
        found = CurveSet.from_arrays("file", arrays())
        assert (found.name, found.family) == ("digits", "small")
        assert found.recordings == (
            Recording(
                values=(2.0, 1.0),
                seconds=(1.0, 2.0),
                first=3.0,
                params={"lr": 0.1, "optimizer": "sgd"},
            ),
            Recording(
                values=(5.0,),
                seconds=(0.5,),
                first=4.0,
                params={"lr": 0.2, "optimizer": "adam"},
            ),
        )

    def test_a_parameter_that_a_trial_does_not_have(self) -> None:
        """NaN stands for it in an array."""
        found = CurveSet.from_arrays("file", arrays(params=np.array([[0.1, np.nan], [0.2, 1.0]])))
        first, second = (each.params for each in found.recordings)
        assert (first, second) == ({"lr": 0.1}, {"lr": 0.2, "optimizer": "adam"})

    @pytest.mark.parametrize("missing", [("params",), ("param_names",), ("params", "param_names")])
    def test_what_may_be_missing(self, missing: Sequence[str]) -> None:
        """Without meta a set is called as its file and is a family of its own."""
        found = CurveSet.from_arrays("file", arrays(meta=None, **dict.fromkeys(missing)))
        assert (found.name, found.family) == ("file", "file")
        assert [each.params for each in found.recordings] == [{}, {}]

    def test_values_need_not_be_finite(self) -> None:
        """A trial may diverge, as long as one of the set ends well."""
        value = np.array([[3.0, np.nan, 1.0], [4.0, np.inf, np.nan]])
        found = CurveSet.from_arrays("file", arrays(value=value))
        assert found.recordings[1].final == math.inf

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"value": None}, "must have 'value' but file has none"),
            ({"seconds": None}, "must have 'seconds' but file has none"),
            ({"length": None}, "must have 'length' but file has none"),
            ({"value": np.array(["a"])}, "'value' must hold numbers"),
            ({"value": np.array([1j])}, "'value' must hold numbers, but: they are complex"),
            ({"value": np.zeros(3)}, r"value \[n, T\+1\]"),
            ({"seconds": np.ones((2, 3))}, r"has \(2, 3\) and \(2, 3\)"),
            ({"length": np.array([2])}, r"length \[n\] for 2 trials but has \(1,\)"),
            ({"length": np.array([2, 0])}, "1 to 2 units but got 0"),
            ({"length": np.array([3, 1])}, "1 to 2 units but got 3"),
            ({"length": np.array([2, 1.5])}, "1 to 2 units but got 1.5"),
            ({"length": np.array([2, np.nan])}, "1 to 2 units but got nan"),
            ({"seconds": np.array([[1.0, 0.0], [1, 1]])}, "positive number of seconds but got 0"),
            ({"seconds": np.array([[1.0, np.nan], [1, 1]])}, "seconds but got nan"),
            ({"seconds": np.array([[1.0, np.inf], [1, 1]])}, "seconds but got inf"),
            ({"value": np.full((2, 3), np.nan)}, "some trial must end with a finite value"),
            ({"meta": np.array("{")}, "'meta' must be JSON"),
            ({"meta": np.array("[1]")}, r"'meta' must be a JSON object but got \[1\]"),
            (
                {"meta": np.array('{"direction": "maximize"}')},
                "must be 'minimize', .* but got 'maximize': for what is maximised save -value",
            ),
            ({"params": np.zeros((2, 3))}, r"params \[2, 2\].*has \(2, 3\)"),
            (
                {"value": np.zeros((2, 1)), "seconds": np.zeros((2, 0))},
                "a trial and a unit at least but has 2 trials of 0 units",
            ),
            (
                {"value": np.zeros((0, 3)), "seconds": np.zeros((0, 2)), "length": np.zeros(0)},
                "a trial and a unit at least but has 0 trials of 2 units",
            ),
        ],
    )
    def test_wrong_arrays(self, changed: dict[str, Any], message: str) -> None:
        """An error in a set is told in one line that names the set."""
        with pytest.raises(InvalidInputError, match=message) as caught:
            CurveSet.from_arrays("file", arrays(**changed))
        assert "file" in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_draw(self) -> None:
        """Trials are drawn as numpy's generator of that seed draws them, without replacement."""
        recordings = tuple(Recording(values=(float(i),), seconds=(1.0,)) for i in range(7))
        curves = CurveSet(name="a", family="b", recordings=recordings)
        expected = np.random.default_rng(3).choice(7, 4, replace=False).tolist()
        assert [int(each.final) for each in curves.draw(4, seed=3)] == expected
        everything = [int(each.final) for each in curves.draw(100, seed=3)]
        assert everything == np.random.default_rng(3).choice(7, 7, replace=False).tolist()

    @pytest.mark.parametrize(("values", "seconds"), [((), ()), ((1.0,), (1.0, 2.0))])
    def test_a_recording_has_a_unit(
        self, values: tuple[float, ...], seconds: tuple[float, ...]
    ) -> None:
        """Values and seconds go together, and there is one of each at least."""
        with pytest.raises(ValueError, match="one length of at least 1"):
            Recording(values=values, seconds=seconds)
