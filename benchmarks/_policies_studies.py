"""Studies with a sampler and a budget: their best values when the budget is spent."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, product
from typing import Any

from optuna_hermes.model import Budget, Decision, Snapshot
from optuna_hermes.policies import Hermes
from optuna_hermes.replay import Result, parallel_map
from optuna_hermes.replay._proposals import PRUNERS
from optuna_hermes.replay._studies import (
    TIMES,
    StudyMetrics,
    StudyRules,
    measure_study,
    study_trace,
    tabulate_studies,
)
from optuna_hermes.replay._table import ratios
from optuna_hermes.simulator import CurveSet
from optuna_hermes.simulator._metrics import span_of

OPENINGS = (0.05, 0.3, 1.0)
"""Costs of opening a trial, in units."""
UNTOLD = f"{__name__}:HermesUntold"
TPE = "TPESampler"
SURROGATE = "surrogate"
PLAIN_OPTUNA = ("fifo", TPE)
DEFAULTS = ("hermes", SURROGATE)
CONTESTANTS = (
    DEFAULTS,
    (UNTOLD, SURROGATE),
    ("hermes", TPE),
    ("hermes", "RandomSampler"),
    ("freeze-thaw", TPE),
    ("asha", TPE),
    *((name, TPE) for name in PRUNERS),
    PLAIN_OPTUNA,
)
"""Policies and their samplers."""
LEAST = 1e-3
"""Added to every regret, since a mean of logarithms has no place for 0."""

EXPLANATION = """\
A sampler proposes, and a study ends when its budget is spent. any: regret of its best value by
then; fin: that of its best finished trial; in % of the span from the median first value of the set
to its best final one, geometric means over sets and seeds of it and 0.1 %. It is 100 % at most, and
without a finished trial. As fast: how many times as soon as plain Optuna, which is `fifo` with TPE,
some value (any) or that of a finished trial (fin) is within 5 % or 1 % of that span of the best;
never counts as at the end of the budget; geometric means over sets of the mean over seeds.
`surrogate` is what `HermesSampler()` proposes by. `hermes`, not told: it knows neither the budget
nor what an opening costs. The stopping rules are Optuna's own pruners. **Bold: better than `hermes`
with `surrogate`.**"""


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
    times: Result[StudyMetrics]


def simulate_endings(
    sets: Sequence[CurveSet],
    contestants: Sequence[tuple[str, str]],
    settings: Sequence[StudyRules],
    *,
    n_seeds: int,
    processes: int | None = None,
    on_job: Callable[[int, int], None] = lambda done, total: None,
) -> list[dict[str, Any]]:
    """A block for each setting, with a row for each policy and its sampler."""
    jobs = list(product(settings, contestants, range(len(sets)), range(n_seeds)))
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
            "rows": _rows(
                {
                    each: [ending for job, ending in found.items() if job[:2] == (setting, each)]
                    for each in contestants
                }
            ),
        }
        for setting in settings
    ]


def _ending(sets: Sequence[CurveSet], job: tuple[StudyRules, tuple[str, str], int, int]) -> Ending:
    setting, (policy, sampler), index, seed = job
    setting, chosen = replace(setting, sampler=sampler), sets[index]
    trace = study_trace(chosen, policy, setting, seed=seed)
    lowest, span = span_of(chosen.recordings)

    def regret(values: Sequence[float]) -> float:
        known = [value for value in values if not math.isnan(value)]
        above = min(known, default=math.inf) - lowest
        # Without a span any value above the lowest is as far off as none.
        return min(1.0, above / span if span else math.inf) if above > 0 else 0.0

    return Ending(
        any=regret([each.value for each in trace.slices]),
        fin=regret([trace.recordings[number].final for number in trace.finished]),
        opened=len(trace.recordings),
        finished=len(trace.finished),
        times=Result(
            curve_set=chosen.name,
            family=chosen.family,
            policy=f"{policy}/{sampler}",
            seed=seed,
            metrics=measure_study(trace, chosen, setting),
        ),
    )


def _rows(found: Mapping[tuple[str, str], Sequence[Ending]]) -> list[dict[str, Any]]:
    """A row for each contestant."""
    all_times = [each.times for endings in found.values() for each in endings]
    times = dict(zip(found, tabulate_studies(all_times), strict=True))
    plain = [times[PLAIN_OPTUNA]] if PLAIN_OPTUNA in times else []
    return [
        {**_row(*each, endings), "as_fast": ratios(times[each], plain, TIMES)}
        for each, endings in found.items()
    ]


def _row(policy: str, sampler: str, endings: Sequence[Ending]) -> dict[str, Any]:
    def mean(regrets: Sequence[float]) -> float:
        return math.exp(math.fsum(math.log(each + LEAST) for each in regrets) / len(regrets))

    return {
        "policy": "hermes, not told" if policy == UNTOLD else policy,
        "sampler": sampler.removesuffix("Sampler"),
        "any": mean([each.any for each in endings]),
        "fin": mean([each.fin for each in endings]),
        "opened": sum(each.opened for each in endings) / len(endings),
        "finished": sum(each.finished for each in endings) / len(endings),
    }
