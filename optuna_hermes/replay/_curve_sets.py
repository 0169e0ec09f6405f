"""Readers of curve sets: from ``.npz`` files, and from a study's ledger."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from optuna_hermes.errors import InvalidInputError
from optuna_hermes.simulator import CurveSet, Recording

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

    from optuna_hermes._optuna import Study
    from optuna_hermes.ledger import Ledger
    from optuna_hermes.model import Curve


def read_curve_set(path: str | Path) -> CurveSet:
    """Read a curve set from an ``.npz`` file, without unpickling; see ``CurveSet.from_arrays``.

    Raises:
        InvalidInputError: there is no such file, or it is not a curve set.
    """
    try:
        # Opened here: numpy does not close a file whose content it refuses.
        with open(path, "rb") as file:
            loaded = np.load(file, allow_pickle=False)
            arrays = loaded if isinstance(loaded, np.ndarray) else dict(loaded.items())
    except OSError as error:
        reason = error.strerror or str(error)
        raise InvalidInputError(f"{path} cannot be read: {reason}.") from error
    except (ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise InvalidInputError(
            f"{path} must be an .npz file of plain arrays (numpy.savez) but is not, or is damaged."
        ) from error
    if isinstance(arrays, np.ndarray):
        raise InvalidInputError(f"{path} must be an .npz file but is a single array.")
    return CurveSet.from_arrays(str(path), arrays)


# Least time of a unit, for two reports at the same reading of the worker's clock.
SHORTEST_SECONDS = 1e-6


def curve_set_of(study: Study, ledger: Ledger) -> CurveSet:
    """The curve set of a study's trials as they were trained, less those without a report.

    An unfinished trial ends at its last report, and one that has failed is left out. The last unit
    of a finished one has the device time after it, too.

    Raises:
        InvalidInputError: no trial has a finite value.
    """
    from optuna_hermes import _optuna

    had = {
        each.number: each.device_seconds for each in ledger.load_trials(_optuna.study_key(study))
    }
    recordings = tuple(
        _recording(trial, curve, had.get(trial.number, 0.0) if trial.state.is_finished() else 0.0)
        for trial, curve in _trained(study, ledger)
    )
    finals = (recording.final for recording in recordings)
    if not any(float("-inf") < final < float("inf") for final in finals):
        raise InvalidInputError(
            f"Study {study.study_name!r} has no trial with a finite value to replay: train some "
            "first."
        )
    return CurveSet(name=study.study_name, family="study", recordings=recordings)


def incomplete_trials(study: Study, ledger: Ledger) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The trials that ``curve_set_of`` cuts off, and the begun ones that it leaves out."""
    states = {trial.number: trial.state.name for trial, _ in _trained(study, ledger)}
    cut = tuple(number for number, state in states.items() if state != "COMPLETE")
    begun = (trial for trial in study.get_trials(deepcopy=False) if trial.state.name != "WAITING")
    return cut, tuple(trial.number for trial in begun if trial.number not in states)


def _trained(study: Study, ledger: Ledger) -> Iterator[tuple[FrozenTrial, Curve]]:
    from optuna_hermes import _optuna

    curves = ledger.load_curves(_optuna.study_key(study))
    for trial in study.get_trials(deepcopy=False):
        curve = curves.get(trial.number)
        if curve is not None and curve.units and trial.state.name != "FAIL":
            yield trial, curve


def _recording(trial: FrozenTrial, curve: Curve, in_all: float) -> Recording:
    ends = (*curve.device_seconds[:-1], max(in_all, curve.device_seconds[-1]))
    used = (0.0, *ends)
    return Recording(
        # The ledger stores those of a maximised study with changed sign: lower is better.
        values=curve.values,
        seconds=tuple(
            max(SHORTEST_SECONDS, after - before) for before, after in zip(used, ends, strict=False)
        ),
        params=dict(trial.params),
    )
