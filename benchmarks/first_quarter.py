"""Do training losses within a trial's first unit tell how it will end?

    python benchmarks/first_quarter.py
    python benchmarks/first_quarter.py --tasks tabular --trainings 20 --json

Random configurations of tasks of ``race.py`` are trained to their ends, as fast as the processor
can. Of each, the mean training loss of the first quarter, of the first half and of all batches of
the first unit, and the held-out value after 1, 2, 3 and 5 units, are compared with the last value:
by Spearman's rank correlation, and by the median place that the five best had by it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from _race_loop import Training
from _race_tasks import TASKS, UNITS, Params, draw, load_task
from _race_watch import Watch
from scipy.stats import spearmanr
from torch import nn

SEED = 5
N_BEST = 5
SHARES = (0.25, 0.5, 1.0)
AGES = (1, 2, 3, 5)


class Unpaced:
    """Stands in for a trial's watch: no batch waits."""

    def batch(self, unit: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def value(self, unit: int, value: float) -> None:
        pass


@dataclass
class Record:
    """The losses of a training's first unit, by batch, and its values, by unit."""

    losses: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def loss(self, share: float) -> float:
        """Mean training loss of a share of the first unit."""
        return statistics.fmean(self.losses[: math.ceil(share * len(self.losses))])


def train(task: Any, params: Params) -> Record:
    """One training, to its end."""
    training: Training = task.begin(params)
    record, inner = Record(), training.loss

    def loss(model: nn.Module, batch: Any) -> Any:
        value = inner(model, batch)
        if model.training and not record.values:
            record.losses.append(float(value.detach()))
        return value

    training.loss = loss
    training.train(cast(Watch, Unpaced()), record.values.append)
    return record


def compare(records: Sequence[Record]) -> Iterator[dict[str, Any]]:
    """What each early figure says of the last value, and at which places it has the best."""
    last = _finite([each.values[-1] for each in records])
    best = np.argsort(last, kind="stable")[:N_BEST]
    early = {
        f"loss of {share:.0%} of unit 1": [each.loss(share) for each in records] for share in SHARES
    }
    early |= {f"value after {age}": [each.values[age - 1] for each in records] for age in AGES}
    for name, figures in early.items():
        values = _finite(figures)
        places = [int((values < values[each]).sum()) + 1 for each in best]
        correlation = float(spearmanr(values, last).statistic)
        yield {
            "early": name,
            "correlation": round(correlation, 2),
            "best_five_at": statistics.median(places),
        }


def _finite(values: Sequence[float]) -> Any:
    """As an array in which what is not finite ranks last."""
    return np.nan_to_num(np.array(values), nan=1e30, posinf=1e30)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    loops = [name for name in TASKS if load_task(name).KIND == "loop"]
    parser.add_argument(
        "--tasks", default=",".join(loops), help=f"a,b,... among {', '.join(loops)}"
    )
    parser.add_argument("--trainings", type=int, default=100, help="of each task")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    for unknown in set(options.tasks.split(",")) - set(loops):
        parser.error(f"unknown task {unknown}; choose among {', '.join(loops)}")
    results = {}
    for name in options.tasks.split(","):
        task, rng = load_task(name), np.random.default_rng(SEED)
        records = [
            train(task, {key: draw(each, rng) for key, each in task.SPACE.items()})
            for _ in range(options.trainings)
        ]
        results[name] = list(compare(records))
        if not options.json:
            print(
                f"{name}: {options.trainings} trainings of {UNITS} units, seed {SEED}", flush=True
            )
            for row in results[name]:
                print(
                    f"  {row['early']:<22} correlation {row['correlation']:5.2f}, "
                    f"the best {N_BEST} at place {row['best_five_at']:g}"
                )
    if options.json:
        print(json.dumps({"seed": SEED, "trainings": options.trainings, "tasks": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
