"""Cases of ``policies.py``: trainings that differ from the recorded ones in one way."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from optuna_hermes.simulator import CurveSet, Recording
from optuna_hermes.simulator._metrics import by_final

NEARLY_EQUAL = "nearly-equal"
_KEPT = 0.1
"""Share of a set that ends best, whose trainings are nearly equal: as after a search."""
_SEED = 97
"""Beside the seed of the draw, so that a case does not follow from it."""


def kept(case: str, curves: CurveSet) -> CurveSet:
    """The set of a case, which trials are drawn from."""
    if case != NEARLY_EQUAL:
        return curves
    order = by_final(curves.recordings)
    best = sorted(order[: max(2, round(_KEPT * len(order)))])
    return replace(curves, recordings=tuple(curves.recordings[index] for index in best))


def as_in(case: str, drawn: Sequence[Recording], seed: int) -> list[Recording]:
    """The drawn trainings as they are in a case."""
    return _TRUE.get(case, _as_recorded)(drawn, np.random.default_rng([_SEED, seed]))


def as_reported(case: str, trainings: Sequence[Recording], seed: int) -> list[Recording]:
    """Return trainings as a policy is told of them; they are measured by what they are."""
    return _REPORTED.get(case, _as_recorded)(trainings, np.random.default_rng([_SEED, seed]))


def _as_recorded(drawn: Sequence[Recording], rng: np.random.Generator) -> list[Recording]:
    return list(drawn)


def _priced(drawn: Sequence[Recording], rng: np.random.Generator) -> list[Recording]:
    """A unit costs 1 to 16 times as much, by the place of the trial's first parameter."""
    first = [next(iter(each.params.values()), 0.0) for each in drawn]
    places = np.argsort(np.argsort(first, kind="stable")) / max(1, len(drawn) - 1)
    return [
        replace(each, seconds=tuple(second * 16**place for second in each.seconds))
        for each, place in zip(drawn, places.tolist(), strict=True)
    ]


def _shortened(drawn: Sequence[Recording], rng: np.random.Generator) -> list[Recording]:
    """Trainings end after 8 units or more, evenly by the logarithm."""
    longest = max(len(each.values) for each in drawn)
    low, high = math.log(min(8, longest)), math.log(longest)
    lengths = np.exp(rng.uniform(low, high, len(drawn))).round().astype(int).tolist()
    return [
        replace(each, values=each.values[:length], seconds=each.seconds[:length])
        for each, length in zip(drawn, lengths, strict=True)
    ]


def _crashed(drawn: Sequence[Recording], rng: np.random.Generator) -> list[Recording]:
    """One in twenty ends early, without a value."""
    crashes = rng.random(len(drawn)) < 0.05
    ends = [int(rng.integers(1, len(each.values) + 1)) for each in drawn]
    return [
        replace(each, values=(*each.values[: end - 1], math.nan), seconds=each.seconds[:end])
        if crash
        else each
        for each, crash, end in zip(drawn, crashes.tolist(), ends, strict=True)
    ]


def _noisy(
    share: float, trainings: Sequence[Recording], rng: np.random.Generator
) -> list[Recording]:
    """Every value has an error: a share of what lies between the median final one and the best."""
    finals = [each.final for each in trainings if math.isfinite(each.final)]
    deviation = share * (float(np.median(finals)) - min(finals))
    return [
        replace(each, values=tuple((np.asarray(each.values) + error).tolist()))
        for each in trainings
        for error in [deviation * rng.standard_normal(len(each.values))]
    ]


_Change = Callable[[Sequence[Recording], np.random.Generator], list[Recording]]
_TRUE: Mapping[str, _Change] = {"prices": _priced, "lengths": _shortened, "crashes": _crashed}
_REPORTED: Mapping[str, _Change] = {
    "noise-5": partial(_noisy, 0.05),
    "noise-30": partial(_noisy, 0.3),
}
CASES: Mapping[str, str] = {
    NEARLY_EQUAL: "the tenth of each set that ends best",
    "noise-5": "reported values have errors of 5 % of the median final value above the best",
    "noise-30": "reported values have errors of 30 % of the median final value above the best",
    "prices": "a unit costs 1 to 16 times as much, by a parameter",
    "lengths": "trainings end after 8 units or more",
    "crashes": "5 % of the trainings fail",
}
"""Cases by name, with what is different in each."""
