"""Work of elastic jobs for the simulator of jobs: devices and batch size may change."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from _elastic_applications import Application, Shape

from optuna_hermes.cluster.jobs import JobProgress, Placement, Work
from optuna_hermes.model import Curve, Elastic, Speed

# Number of devices of the measured hosts; a larger host counts as several of them.
HOST_DEVICES = 4


@dataclass(frozen=True, kw_only=True)
class ElasticWork(Work):
    """The work of a training of an application, from its first epoch to its last."""

    application: Application
    batch_size: int  # its submitted batch size, samples a step over all devices
    # The most devices it can be given; None for a job that is not elastic and shows no progress to
    # policies.
    most_devices: int | None = None
    shows_epochs_left: bool = True  # whether policies see the number of epochs left

    @property
    def total(self) -> float:
        """The amount of work in steps of the application's smallest batch size."""
        return self.application.ends[-1]

    def speed(self, done: float, devices: Placement, batch_size: int | None) -> tuple[float, float]:
        """Its speed until the epoch ends."""
        epoch = self.application.epoch(done)
        batch = self.batch_size if batch_size is None else batch_size
        return self.application.speed(epoch, shape_of(devices), batch), self.application.ends[epoch]

    def shown(self, progress: JobProgress) -> Mapping[str, Any]:
        """Its epochs as a curve, and the limits and measurements of its elasticity."""
        if self.most_devices is None:
            return {}
        n_epochs = bisect_right(self.application.ends, progress.done)
        batch = self.batch_size if progress.batch_size is None else progress.batch_size
        seconds = tuple(progress.stretches[:n_epochs])
        values = tuple(self.application.loss(epoch, batch) for epoch in range(len(seconds)))
        steps = tuple(range(1, len(seconds) + 1))
        # As a trial would show itself: what its own training has measured, and nothing of the rest.
        return {
            "curve": Curve(steps=steps, values=values, device_seconds=seconds),
            "units_left": len(self.application.ends) - n_epochs if self.shows_epochs_left else None,
            "elastic": Elastic(
                batch_size=batch,
                batch_sizes=self.application.batch_sizes,
                devices=(1, self.most_devices),
                device_batch_size=self.application.times.largest(),
                noise_scale=self.application.noise_scale(progress.done, batch),
                unit_samples=self.application.unit_samples,
                speeds=tuple(self._speed(*each) for each in sorted(progress.trained, key=str)),
            ),
        }

    def _speed(self, devices: Placement, batch_size: int | None) -> Speed:
        shape = shape_of(devices)
        planned = self.application.plan(shape, batch_size or self.batch_size)
        assert planned is not None, "it has trained there"
        samples, seconds = planned
        return Speed(devices=sum(shape), hosts=len(shape), batch_size=samples, step_seconds=seconds)


def shape_of(devices: Placement) -> Shape:
    """Devices of each host, ascending; a host of more than ``HOST_DEVICES`` counts as several."""
    shape: list[int] = []
    for count in devices:
        shape += [HOST_DEVICES] * (count // HOST_DEVICES)
        shape += [count % HOST_DEVICES] * (count % HOST_DEVICES > 0)
    return tuple(sorted(shape))
