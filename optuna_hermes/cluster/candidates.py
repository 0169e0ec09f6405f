"""Candidates for devices: the trials that could have some, and their time to end on each number."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

import numpy as np

from optuna_hermes.cluster.qssf import seconds_left
from optuna_hermes.model import Elastic, Snapshot, Speed, TrialView
from optuna_hermes.policies.base import free_devices, opened, unopened
from optuna_hermes.policies.step_model import HUGE, Array, StepModel, fit_steps

# Largest factor by which a trial's devices and batch may exceed the measured ones.
MAX_GROWTH = 2
# Batch sizes whose times differ by less are taken to be equal.
EQUAL = 1e-6


def batch_choices(elastic: Elastic) -> list[int]:
    """Batch sizes to try: powers of two times the least one, and the limits."""
    low, high = elastic.batch_sizes
    known = max((each.batch_size for each in elastic.speeds), default=elastic.batch_size)
    # Twice the measured one at most: it grows as the trial trains.
    high = max(elastic.batch_size, min(high, MAX_GROWTH * known))
    doublings = range(int(math.log2(high / low)) + 1)
    return sorted({elastic.batch_size, high, *(low << times for times in doublings)})


def worth_of_samples(elastic: Elastic, batch_sizes: Array, *, later: bool = False) -> Array:
    """Progress per sample at batch sizes, by the gradient noise scale; 1 at the least size."""
    noise = elastic.noise_scale
    if noise is None or not math.isfinite(noise) or noise < 0:
        return np.ones_like(batch_sizes)
    # Noise grows in training: later it is no less than the largest batch that the trial may have.
    noise = min(noise if not later else max(noise, elastic.batch_sizes[1]), HUGE)
    return (noise + elastic.batch_sizes[0]) / (noise + batch_sizes)


def most_devices(elastic: Elastic, wanted: int) -> int:
    """The most devices a trial may be tried on: twice the measured ones, or those it wants."""
    known = max((each.devices for each in elastic.speeds), default=0)
    most = min(elastic.devices[1], max(MAX_GROWTH * known, wanted))
    return max(most, elastic.devices[0])


def unit_seconds(
    elastic: Elastic, model: StepModel, batch_sizes: Array, devices: Array, *, later: bool = False
) -> Array:
    """Seconds of a unit, or of a sample if its size is unknown [batch size, devices, hosts > 1]."""
    rows, columns = batch_sizes[:, None], devices[None, :]
    several = (columns > 1).astype(float)
    steps = [model.step_seconds(columns, rows, apart) for apart in (0.0 * several, several)]
    worth = worth_of_samples(elastic, rows, later=later)
    # Among sizes that seem equal the largest is tried, so that it is measured from then on.
    doubt = 1.0 + EQUAL * np.arange(len(batch_sizes) - 1.0, -1.0, -1.0)
    seconds: Array = np.stack(steps, axis=2) * (doubt[:, None] / (rows * worth))[:, :, None]
    return seconds * (elastic.unit_samples or 1.0)


def pooled(speeds: Iterable[Speed]) -> tuple[Speed, ...]:
    """Measurements of several trials, the mean of those with equal devices, hosts and batch."""
    by_place: defaultdict[tuple[int, int, int], list[float]] = defaultdict(list)
    for each in speeds:
        by_place[each.devices, each.hosts, each.batch_size].append(each.step_seconds)
    return tuple(
        Speed(devices=w, hosts=h, batch_size=m, step_seconds=sum(all_) / len(all_))
        for (w, h, m), all_ in sorted(by_place.items())
    )


# The least number of units left of a trial that is not over, also if fewer were expected.
LEAST_UNITS = 0.5
# Of device seconds, likewise: values are divided by them.
LEAST_SECONDS = 1e-3


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """A trial that could have devices."""

    trial: TrialView | None  # its view, None for a trial that is not created yet
    place: int  # index among those that are not created yet, otherwise 0
    batch_sizes: tuple[int | None, ...]  # those it could be given, None for the one it has
    # Time to its end [batch size, devices, several hosts]; infinite where it cannot be trained so,
    # 0 on no device.
    seconds: Array
    wanted: int  # number of devices that it was submitted with
    diverged: bool  # whether its last value is NaN or infinite

    @property
    def number(self) -> int | None:
        """The trial's number."""
        return None if self.trial is None else self.trial.number

    @property
    def switch_seconds(self) -> float:
        """The cost of moving it to other devices."""
        return 0.0 if self.trial is None else self.trial.switch_cost_seconds

    @property
    def key(self) -> tuple[bool, float, bool, int, int]:
        """Sort key: smallest remaining utilisation, then those that exist, by number."""
        number = 0 if self.trial is None else self.trial.number
        return self.diverged, self.use, self.trial is None, number, self.place

    @property
    def use(self) -> float:
        """Device seconds until its end, on the number of devices where that is least."""
        counts = np.arange(self.seconds.shape[1])[None, 1:, None]
        return float((self.seconds[:, 1:] * counts).min())

    @property
    def counts(self) -> tuple[int, ...]:
        """The numbers of devices that it can be trained on, ascending."""
        trains = np.isfinite(self.seconds[..., 0]).any(axis=0)
        return tuple(np.flatnonzero(trains)[1:].tolist())


def candidates(snapshot: Snapshot, most: int) -> list[Candidate]:
    """The trials that could have the free devices, the one with the least left to do first.

    Only the ``most`` of them with the least left by a rough estimate are worked out in full. Units
    left are those that the trial reports; otherwise its progress is sampled, as ONES does, from a
    Beta distribution about the length of trials with the same parameters, or of all. Seconds of a
    unit come from measured speeds through ``fit_steps``; a trial without any is as fast as its
    units were, and sped up in proportion by more devices. Jobs that tell no units have the device
    seconds that were expected of them at submission.
    """
    estimates = _Estimates(snapshot)
    trials: list[tuple[TrialView | None, int]] = [(trial, 0) for trial in opened(snapshot)]
    trials += [(trial, place) for place, trial in enumerate(unopened(snapshot))]
    # Before the cut: those that want more devices than are free would leave no place for others.
    trials = [each for each in trials if estimates.fits(each[0])]
    rough = [
        (estimates.roughly(trial), trial is None, place if trial is None else trial.number)
        for trial, place in trials
    ]
    order = sorted(range(len(trials)), key=rough.__getitem__)[:most]
    found = [estimates.candidate(*trials[index]) for index in order]
    return sorted(found, key=lambda each: each.key)


class _Estimates:
    """Estimates from the trials of a snapshot about each other: lengths, speeds, noise."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._free = free_devices(snapshot)
        self._by_params: dict[str, list[TrialView]] = {}
        for trial in (*snapshot.trials, *snapshot.finished):
            if trial.params and _has_reported(trial):
                self._by_params.setdefault(_params_key(trial.params), []).append(trial)
        stretches = (trial.elastic for trial in (*snapshot.trials, *snapshot.finished))
        self._measures_noise = any(each and each.noise_scale is not None for each in stretches)
        seconds = _seconds_a_unit([*snapshot.trials, *snapshot.finished])
        self._typical_seconds = median(seconds) if seconds else 1.0
        done = [trial.curve.units for trial in snapshot.finished if trial.state == "done"]
        # Until a trial has ended the lengths that others report stand in.
        told = [
            trial.curve.units + trial.units_left
            for trial in snapshot.trials
            if trial.units_left is not None and _has_reported(trial)
        ]
        self._typical_units = fmean(done or told) if done or told else None

    def roughly(self, trial: TrialView | None) -> float:
        """A rough estimate of a trial's remaining device seconds; infinite if it diverged."""
        if trial is None:
            return self._units(trial, ()) * self._typical_seconds
        if (expected := _expected_left(trial)) is not None:
            return expected
        own = _seconds_a_unit([trial])
        left = self._units(trial, self._alike(trial)) * (own[0] if own else self._typical_seconds)
        return math.inf if _diverged(trial) else left

    def fits(self, trial: TrialView | None) -> bool:
        """True if enough of the free devices are for the trial."""
        return trial is None or trial.device_range[0] <= self._free_for(trial)

    def _free_for(self, trial: TrialView) -> int:
        bound = trial.bound_to
        return sum(each.id in bound for each in self._free) if bound else len(self._free)

    def candidate(self, trial: TrialView | None, place: int) -> Candidate:
        """A trial that fits, as a candidate."""
        if trial is None:
            return Candidate(
                trial=None,
                place=place,
                batch_sizes=(None,),
                seconds=self._plain(self._typical_seconds, 1, 1) * self._units(None, ()),
                wanted=1,
                diverged=False,
            )
        least, most = trial.device_range
        most = min(most, self._free_for(trial))
        alike = self._alike(trial)
        batch_sizes, seconds = self._seconds(trial, alike, least, most)
        return Candidate(
            trial=trial,
            place=0,
            batch_sizes=batch_sizes,
            seconds=np.minimum(seconds, np.where(np.isfinite(seconds), HUGE, np.inf)),
            wanted=min(max(trial.devices_wanted, least), most),
            diverged=_diverged(trial),
        )

    def _seconds(
        self, trial: TrialView, alike: Sequence[TrialView], least: int, most: int
    ) -> tuple[tuple[int | None, ...], Array]:
        if (expected := _expected_left(trial)) is not None:
            return (None,), self._plain(expected, least, most)
        units = self._units(trial, alike)
        own = _seconds_a_unit([trial]) or _seconds_a_unit(r for r in alike if r.state == "done")
        unit = fmean(own) if own else self._typical_seconds
        if trial.elastic is None:
            return (None,), self._plain(unit, least, most) * units
        speeds = [speed for each in alike if each.elastic for speed in each.elastic.speeds]
        elastic = replace(trial.elastic, speeds=pooled(speeds))
        # Without noise all samples count the same: it would seem to gain from large batches as no
        # other trial does.
        if elastic.noise_scale is None and self._measures_noise:
            elastic = replace(elastic, noise_scale=float(elastic.batch_size))
        most = min(most, max(most_devices(elastic, trial.devices_wanted), least))
        model = fit_steps(elastic.speeds, elastic.device_batch_size)
        if model is None:
            return (None,), self._plain(unit, least, most) * units
        choices = batch_choices(elastic)
        batches = np.array(choices, dtype=float)
        counts = np.maximum(np.arange(len(self._free) + 1.0), 1.0)
        seconds = unit_seconds(elastic, model, batches, counts)
        later = unit_seconds(elastic, model, batches, counts, later=True).min(axis=0)
        if elastic.unit_samples is None:
            # Only ratios are known: a unit on the devices that it wants is as long as its units.
            wanted = min(max(trial.devices_wanted, least), most)
            scale = unit / wanted / seconds[choices.index(elastic.batch_size), wanted, 0]
            seconds, later = seconds * scale, later * scale
        # The next unit has the gradient noise of now, the others that of later.
        seconds = seconds * min(units, 1.0) + later * max(units - 1.0, 0.0)
        # A device takes a sample at least.
        seconds[batches[:, None] < counts[None, :]] = np.inf
        return tuple(choices), _within(seconds, least, most)

    def _plain(self, device_seconds: float, least: int, most: int) -> Array:
        counts = np.maximum(np.arange(len(self._free) + 1.0), 1.0)
        seconds = np.repeat((device_seconds / counts)[None, :, None], 2, axis=2)
        return _within(seconds, least, most)

    def _alike(self, trial: TrialView) -> Sequence[TrialView]:
        # A trial without parameters is like no other.
        return self._by_params.get(_params_key(trial.params), (trial,))

    def _units(self, trial: TrialView | None, alike: Sequence[TrialView]) -> float:
        if trial is not None and trial.units_left is not None:
            return max(float(trial.units_left), LEAST_UNITS)
        units = 0 if trial is None else trial.curve.units
        ended = [each.curve.units for each in alike if each.state == "done"]
        total = fmean(ended) if ended else self._typical_units
        expected = 0.0 if total is None else total - units
        # One of which nothing is known, or that has overrun, has half of its life before it.
        if expected <= 0:
            expected = max(units, 1.0)
        number = -1 if trial is None else trial.number
        # The same draw until the trial reports; on average about ``expected`` units are left, and
        # one more.
        rng = np.random.default_rng([abs(self._snapshot.seed), number + 1, units])
        rho = rng.beta(units + 2.0, expected + 1.0)
        return max((units + 1.0) * (1.0 / max(rho, 1 / HUGE) - 1.0), LEAST_UNITS)


def _expected_left(trial: TrialView) -> float | None:
    """Device seconds left by a prediction; None where there is none, or units tell more."""
    told = trial.curve.units or trial.units_left is not None or trial.elastic is not None
    if trial.expected_seconds is None or told:
        return None
    return max(seconds_left(trial, trial.expected_seconds), LEAST_SECONDS)


def _within(seconds: Array, least: int, most: int) -> Array:
    seconds[:, :least] = np.inf
    seconds[:, most + 1 :] = np.inf
    seconds[:, 0] = 0.0
    return seconds


def _seconds_a_unit(trials: Iterable[TrialView]) -> list[float]:
    means = (
        trial.curve.device_seconds[-1] / trial.curve.units for trial in trials if trial.curve.units
    )
    return [seconds for seconds in means if 0 < seconds < HUGE]


def _has_reported(trial: TrialView) -> bool:
    return trial.curve.units > 0 or (trial.elastic is not None and bool(trial.elastic.speeds))


def _diverged(trial: TrialView) -> bool:
    return trial.curve.units > 0 and not math.isfinite(trial.curve.values[-1])


def _params_key(params: Mapping[str, object]) -> str:
    return repr(sorted(params.items()))
