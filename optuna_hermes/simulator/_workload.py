"""The workload of a simulation: recorded trainings, and sources of trials."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optuna_hermes.errors import InvalidInputError
from optuna_hermes.model import TrialView, Unstarted


@dataclass(frozen=True, kw_only=True)
class Recording:
    """One recorded training.

    Args:
        values: the objective after each unit, lower is better.
        seconds: device time of each unit.
        first: the objective before the first unit, for the span of a set; NaN if unknown.
        params: the trial's hyper-parameters.
    """

    values: tuple[float, ...]
    seconds: tuple[float, ...]
    first: float = float("nan")
    params: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 < len(self.values) == len(self.seconds):
            raise ValueError(
                "values and seconds must have one length of at least 1 but got "
                f"{len(self.values)} and {len(self.seconds)}."
            )

    @property
    def final(self) -> float:
        """The value after the last unit."""
        return self.values[-1]


class Source(ABC):
    """Source of a simulation's trials, notified of their reports and ends."""

    @property
    @abstractmethod
    def unstarted(self) -> Unstarted:
        """The trials that can still be opened, as policies see them."""

    @abstractmethod
    def open(self, number: int) -> Recording:
        """Open a trial and return its training: the first that is left, or a listed one.

        Args:
            number: that of the listed trial, or the lowest one, from 0, that no trial has yet.
        """

    def reported(self, number: int, unit: int, value: float) -> None:  # noqa: B027
        """Take notice of a reported unit; units count from 1."""

    def ended(self, number: int, *, pruned: bool) -> None:  # noqa: B027
        """Take notice of the end of a trial, by training or by pruning."""


class FixedList(Source):
    """List of trials known beforehand, whose numbers are their places in it."""

    def __init__(self, recordings: Sequence[Recording]) -> None:
        self._recordings = recordings
        self._left = {
            number: TrialView(number=number, state="pending", params=recording.params)
            for number, recording in enumerate(recordings)
        }
        self._known = all(recording.params for recording in recordings)
        self._unstarted: Unstarted | None = None

    @property
    def unstarted(self) -> Unstarted:
        # Kept, since a policy is asked far more often than a trial is opened.
        if self._unstarted is None:
            listed = tuple(self._left.values()) if self._known else ()
            self._unstarted = Unstarted(count=len(self._left), fixed=True, listed=listed)
        return self._unstarted

    def open(self, number: int) -> Recording:
        del self._left[number]
        self._unstarted = None
        return self._recordings[number]


@dataclass(frozen=True, kw_only=True)
class CurveSet:
    """Recorded trainings of one task.

    Args:
        name: the task's name.
        family: name of its group of similar tasks, over which means are taken.
        recordings: its trials.
    """

    name: str
    family: str
    recordings: tuple[Recording, ...]

    @classmethod
    def from_arrays(cls, name: str, arrays: Mapping[str, Any]) -> CurveSet:
        """Read a set from the arrays of its file.

        Args:
            name: the set's name in errors, and where its ``meta`` gives none.
            arrays: ``value`` [n, T+1] (column 0 is before the first unit, lower is better),
                ``seconds`` [n, T], ``length`` [n] (units of each trial), and, if known,
                ``params`` [n, p], ``param_names`` [p] and ``meta`` (JSON: ``name``, ``family``,
                and ``direction``, which may be ``minimize`` only).

        Raises:
            InvalidInputError: an array is missing, or has another shape or impossible values.
        """
        missing = [key for key in ("value", "seconds", "length") if key not in arrays]
        if missing:
            raise InvalidInputError(f"A curve set must have {missing[0]!r} but {name} has none.")
        value, seconds, length = (
            _numbers(name, arrays, key) for key in ("value", "seconds", "length")
        )
        # Shapes first: the second check indexes by them.
        _check_shapes(name, value, seconds, length)
        _check_trials(name, value, seconds, length)
        params = _params(name, arrays, len(length))
        meta = _meta(name, arrays)
        return cls(
            name=str(meta.get("name", name)),
            family=str(meta.get("family", name)),
            recordings=tuple(
                Recording(
                    values=tuple(value[i, 1 : n + 1].tolist()),
                    seconds=tuple(seconds[i, :n].tolist()),
                    first=float(value[i, 0]),
                    params=params[i],
                )
                for i, n in enumerate(length.astype(int).tolist())
            ),
        )

    def draw(self, n_trials: int, seed: int) -> tuple[Recording, ...]:
        """Draw trials in random order without repetition; all of them if there are fewer."""
        n = len(self.recordings)
        chosen = np.random.default_rng(seed).choice(n, min(n_trials, n), replace=False)
        return tuple(self.recordings[index] for index in chosen.tolist())


def _numbers(name: str, arrays: Mapping[str, Any], key: str) -> NDArray[np.float64]:
    try:
        found = np.asarray(arrays[key])
        if np.iscomplexobj(found):
            raise ValueError("they are complex")
        return np.asarray(found, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"{name}: {key!r} must hold numbers, but: {error}") from error


def _check_shapes(
    name: str, value: NDArray[Any], seconds: NDArray[Any], length: NDArray[Any]
) -> None:
    if value.ndim != 2 or seconds.shape != (len(value), value.shape[1] - 1):
        raise InvalidInputError(
            f"{name} must have value [n, T+1] and seconds [n, T] but has {value.shape} and "
            f"{seconds.shape}."
        )
    if length.shape != (len(value),):
        raise InvalidInputError(
            f"{name} must have length [n] for {len(value)} trials but has {length.shape}."
        )
    if not seconds.size:
        raise InvalidInputError(
            f"{name} must have a trial and a unit at least but has {seconds.shape[0]} trials of "
            f"{seconds.shape[1]} units."
        )


def _check_trials(
    name: str, value: NDArray[Any], seconds: NDArray[Any], length: NDArray[Any]
) -> None:
    n_trials, n_units = seconds.shape
    wrong = length[~((length >= 1) & (length <= n_units) & (length == np.floor(length)))]
    if wrong.size:
        raise InvalidInputError(
            f"{name}: a trial must have 1 to {n_units} units but got {wrong[0]:g}."
        )
    used = seconds[np.arange(n_units) < length[:, None]]
    wrong = used[~((used > 0) & (used < np.inf))]
    if wrong.size:
        raise InvalidInputError(
            f"{name}: a unit must take a positive number of seconds but got {wrong[0]:g}."
        )
    if not np.isfinite(value[np.arange(n_trials), length.astype(int)]).any():
        raise InvalidInputError(f"{name}: some trial must end with a finite value but none does.")


def _meta(name: str, arrays: Mapping[str, Any]) -> dict[str, Any]:
    try:
        meta = json.loads(str(arrays["meta"])) if "meta" in arrays else {}
    except ValueError as error:
        raise InvalidInputError(f"{name}: 'meta' must be JSON, but: {error}") from error
    if not isinstance(meta, dict):
        raise InvalidInputError(f"{name}: 'meta' must be a JSON object but got {meta!r}.")
    direction = meta.get("direction", "minimize")
    if direction != "minimize":
        raise InvalidInputError(
            f"{name}: the direction in 'meta' must be 'minimize', as lower is better, but got "
            f"{direction!r}: for what is maximised save -value, and 'minimize'."
        )
    return meta


def _params(name: str, arrays: Mapping[str, Any], n: int) -> list[dict[str, Any]]:
    """The parameters of each trial; in a column ``name:a|b|c`` 0 stands for the choice ``a``.

    One that a trial does not have is NaN.
    """
    if "params" not in arrays or "param_names" not in arrays:
        return [{} for _ in range(n)]
    names = [str(each) for each in np.atleast_1d(arrays["param_names"])]
    params = np.asarray(arrays["params"])
    if params.shape != (n, len(names)):
        raise InvalidInputError(
            f"{name} must have params [{n}, {len(names)}], a column for each of param_names, but "
            f"has {params.shape}."
        )
    columns = [_column(each) for each in names]
    for (column, choices), values in zip(columns, params.T.tolist(), strict=True):
        unknown = {value for value in values if choices and value == value} - choices.keys()
        if unknown:
            raise InvalidInputError(
                f"{name}: {column} must be 0 to {len(choices) - 1}, one of its choices, but got "
                f"{min(unknown)!r}."
            )
    return [
        {
            column: choices.get(value, value)
            for (column, choices), value in zip(columns, row, strict=True)
            if not (isinstance(value, float) and math.isnan(value))
        }
        for row in params.tolist()
    ]


def _column(text: str) -> tuple[str, Mapping[float, str]]:
    """The name of a column, and the texts of its choices by their numbers; none for numbers."""
    name, _, choices = text.partition(":")
    return (name, dict(enumerate(choices.split("|")))) if "|" in choices else (text, {})
