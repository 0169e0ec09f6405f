"""Studies with a sampler and a budget: their best values when the budget is spent."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, product
from typing import Any

from optuna_hermes.model import Budget, Decision, Snapshot
from optuna_hermes.policies import Hermes
from optuna_hermes.replay import parallel_map
from optuna_hermes.replay._studies import StudyRules, study_trace
from optuna_hermes.simulator import CurveSet
from optuna_hermes.simulator._metrics import span_of

OPENINGS = (0.05, 0.3, 1.0)
"""What opening a trial costs, in units."""
UNTOLD = f"{__name__}:HermesUntold"
POLICIES = ("hermes", UNTOLD, "asha", "fifo", "asha-stop", "median-stop", "hyperband-stop")
LEAST = 1e-3
"""Added to every regret, since a mean of logarithms has no place for 0."""

EXPLANATION = """\
A sampler (TPE) proposes, and a study ends when its budget is spent. any: regret of its best value
by then; fin: that of its best finished trial; in % of the span from the median first value of the
set to its best final one, geometric means over sets and seeds of it and 0.1 %. Without a finished
trial it is 100 %. `hermes`, not told: it knows neither the budget nor what an opening costs.
`fifo` and the stopping rules are plain Optuna with its own pruners."""


class HermesUntold(Hermes):
    """``hermes`` that knows neither the budget nor what an opening costs."""

    def decide(self, snapshot: Snapshot) -> Decision:
        return super().decide(replace(snapshot, left=Budget(), opening_seconds=0.0))


@dataclass(frozen=True, kw_only=True)
class Ending:
    """A study when its budget is spent."""

    any: float
    fin: float
    opened: int
    finished: int


def simulate_endings(
    sets: Sequence[CurveSet],
    policies: Sequence[str],
    settings: Sequence[StudyRules],
    *,
    n_seeds: int,
    processes: int | None = None,
    on_job: Callable[[int, int], None] = lambda done, total: None,
) -> list[dict[str, Any]]:
    """A block for each setting, with a row for each policy."""
    jobs = list(product(settings, policies, range(len(sets)), range(n_seeds)))
    done = count(1)
    endings = parallel_map(
        partial(_ending, sets),
        jobs,
        processes=processes,
        on_answer=lambda: on_job(next(done), len(jobs)),
    )
    found = dict(zip(jobs, endings, strict=True))
    return [
        {
            "devices": setting.n_devices,
            "budget": setting.budget,
            "opening": setting.opening_cost,
            "rows": [
                _row(policy, [e for job, e in found.items() if job[:2] == (setting, policy)])
                for policy in policies
            ],
        }
        for setting in settings
    ]


def _ending(sets: Sequence[CurveSet], job: tuple[StudyRules, str, int, int]) -> Ending:
    setting, policy, index, seed = job
    trace = study_trace(sets[index], policy, setting, seed=seed)
    lowest, span = span_of(sets[index].recordings)

    def regret(values: Sequence[float]) -> float:
        known = [value for value in values if not math.isnan(value)]
        return max(0.0, (min(known) - lowest) / span) if known else 1.0

    return Ending(
        any=regret([each.value for each in trace.slices]),
        fin=regret([trace.recordings[number].final for number in trace.finished]),
        opened=len(trace.recordings),
        finished=len(trace.finished),
    )


def _row(policy: str, endings: Sequence[Ending]) -> dict[str, Any]:
    def mean(regrets: Sequence[float]) -> float:
        return math.exp(math.fsum(math.log(each + LEAST) for each in regrets) / len(regrets))

    return {
        "policy": "hermes, not told" if policy == UNTOLD else policy,
        "any": mean([each.any for each in endings]),
        "fin": mean([each.fin for each in endings]),
        "opened": sum(each.opened for each in endings) / len(endings),
        "finished": sum(each.finished for each in endings) / len(endings),
    }
