"""Curves from reports, as plain tuples, since there may be hundreds of thousands."""

from __future__ import annotations

from collections.abc import Iterable

from optuna_hermes.model import Curve

Report = tuple[int, int, int, float, float]
"""A trial's number, unit, step, value and device seconds."""

_Unit = tuple[int, float, float]


def curves_of(reports: Iterable[Report]) -> dict[int, Curve]:
    """The curve of each run in ``reports``, which come in the order of writing.

    A unit that was reported twice has its later report.
    """
    runs: dict[int, dict[int, _Unit]] = {}
    for number, unit, step, value, device_seconds in reports:
        units = runs.get(number)
        if units is None:
            units = runs[number] = {}
        units[unit] = (step, value, device_seconds)
    return {number: _curve(runs[number]) for number in sorted(runs)}


def _curve(units: dict[int, _Unit]) -> Curve:
    steps, values, device_seconds = zip(*(units[unit] for unit in sorted(units)), strict=True)
    return Curve(steps=steps, values=values, device_seconds=device_seconds)
