"""Elastic trials: their limits and speeds, and whether another number of devices pays. Pure."""

from __future__ import annotations

from optuna_hermes.broker._core._live_trial import LiveTrial
from optuna_hermes.model import BatchSizes, Elastic, Speed

WORTH = 1.1
"""Factor by which the gain of a change must exceed its cost."""


def take_sizes(trial: LiveTrial, sizes: BatchSizes) -> None:
    """Take sizes of batches; speeds measured on other numbers of devices still hold."""
    trial.sizes = sizes
    here = len(trial.devices)
    speeds = [each for each in trial.speeds if each.devices != here]
    speeds += (
        Speed(devices=here, batch_size=size, step_seconds=seconds)
        for size, seconds in sizes.seconds.items()
        if seconds > 0
    )
    trial.speeds = tuple(sorted(speeds, key=lambda each: (each.devices, each.batch_size)))


def elastic_of(trial: LiveTrial) -> Elastic | None:
    """Limits within which a trial may be stretched, None if it has reported none."""
    sizes = trial.sizes
    if sizes is None:
        return None
    return Elastic(
        batch_size=sizes.now,
        batch_sizes=(sizes.least, sizes.most),
        devices=trial.device_range,
        unit_samples=sizes.unit_samples,
        speeds=trial.speeds,
    )


def pays(
    elastic: Elastic,
    before: int,
    after: int,
    *,
    given_away: int,
    slice_seconds: float,
    leave_seconds: float,
    back_seconds: float,
) -> bool:
    """True if a trial had better go on with another number of devices for its next slice.

    All is counted in device time. A trial that is quicker wins the time that the devices it had
    would have needed for what the new ones train in addition, by the fit to its measured steps;
    what nothing was measured of counts as perfect. What others get of its devices is won too. A
    change costs the old devices while the trial leaves to disk, and the new ones while it comes
    back.

    Args:
        elastic: what is known of the trial.
        before: devices that it has.
        after: devices that it would have.
        given_away: of the devices that it has, those that others would get.
        slice_seconds: how long its next slice lasts.
        leave_seconds: what suspending to disk was measured to take, 0.0 if it never was.
        back_seconds: what coming back from disk was measured to take, 0.0 if it never was.
    """
    quicker = max(0.0, _speedup(elastic, before, after) - 1)
    gain = slice_seconds * (before * quicker + given_away)
    return gain > WORTH * (leave_seconds * before + back_seconds * after)


def _speedup(elastic: Elastic, before: int, after: int) -> float:
    """Factor by which a step is quicker; 1.0 if no step was measured."""
    import numpy as np  # here, since few trials are elastic and a broker starts quickly without

    from optuna_hermes.policies.step_model import fit_steps

    model = fit_steps(elastic.speeds, elastic.device_batch_size)
    if model is None:
        return 1.0
    counts = np.array([before, after], dtype=float)
    batches = np.full(2, float(elastic.batch_size))
    old, new = model.step_seconds(counts, batches, np.zeros(2)).tolist()
    return float(old / new) if new > 0 else 1.0
