"""Figures of a broker for Prometheus."""

from __future__ import annotations

import asyncio
import contextlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, get_args

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._core._events import Event, Received
from optuna_hermes.errors import InvalidInputError
from optuna_hermes.model import OverheadKind

if TYPE_CHECKING:
    from prometheus_client import Metric

ADDRESS = "127.0.0.1"
"""The address that serves them unless another one is asked for."""
ANSWER_SECONDS = 5.0
"""Time after which a busy broker gives no figures."""


BOUNDS_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Upper ends of the bins of a histogram; the last bin has none."""


@dataclass(kw_only=True)
class Times:
    """A histogram of durations: one count for each of ``BOUNDS_SECONDS``, and one beyond."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_SECONDS) + 1))
    total_seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_SECONDS, seconds)] += 1
        self.total_seconds += seconds


@dataclass(kw_only=True)
class Meter:
    """Measurements since the broker began.

    Args:
        reports: values that trials have reported.
        decisions: from an event that may move a device to the answer.
        ledger_writes: transactions with a ledger.
    """

    reports: int = 0
    decisions: Times = field(default_factory=Times)
    ledger_writes: Times = field(default_factory=Times)

    def handled(self, event: Event, seconds: float) -> None:
        message = event.message if isinstance(event, Received) else None
        if isinstance(message, wire.Report):
            self.reports += 1
        elif not isinstance(message, (wire.Beat, wire.GetStatus, wire.WatchStudy)):
            self.decisions.add(seconds)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Figures of a broker at one moment.

    Args:
        status: without trials.
        roles: the role of each connected process.
        meter: what it has measured.
    """

    status: wire.BrokerStatus
    roles: tuple[str, ...]
    meter: Meter


class BrokerMetrics:
    """Measurements of one broker, and figures of it that are served over HTTP.

    Args:
        place: ``ADDRESS:PORT``, or a port alone.
        look: the broker's status, without trials, and the role of each connected process.
    """

    def __init__(
        self, place: str, look: Callable[[], tuple[wire.BrokerStatus, tuple[str, ...]]]
    ) -> None:
        self.meter = Meter()
        self._place = place
        self._look = look

    def serving(self) -> contextlib.AbstractContextManager[None]:
        """Serve the figures inside of a block; see ``serving``."""
        return serving(self._place, self._figures)

    def _figures(self) -> Figures:
        status, roles = self._look()
        return Figures(status=status, roles=roles, meter=self.meter)


@contextlib.contextmanager
def serving(place: str, look: Callable[[], Figures]) -> Iterator[None]:
    """Serve figures over HTTP inside of this block, from a thread.

    Args:
        place: ``ADDRESS:PORT``, or a port alone.
        look: called in the event loop of this thread.

    Raises:
        InvalidInputError: the extra is missing, or the place is none or cannot be had.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError as error:
        raise InvalidInputError(
            "--metrics needs prometheus-client, which is not installed: run `pip install "
            "'optuna-hermes[metrics]'`."
        ) from error
    address, port = parse_place(place)
    registry = CollectorRegistry()
    registry.register(_Collector(look, asyncio.get_running_loop()))
    try:
        server, thread = start_http_server(port, addr=address, registry=registry)
    except OSError as error:
        raise InvalidInputError(
            f"--metrics must be a free port of this host but {address}:{port} is not "
            f"({error.strerror}): choose another one."
        ) from error
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def parse_place(text: str) -> tuple[str, int]:
    """The address and the port of ``ADDRESS:PORT``, or of a port alone.

    Raises:
        InvalidInputError: it is neither.

    Example:
        >>> parse_place("[::]:9464"), parse_place("9464")
        (('::', 9464), ('127.0.0.1', 9464))
    """
    address, _, port = text.rpartition(":")
    if not (port.isdecimal() and port.isascii() and 0 < int(port) < 65536):
        raise InvalidInputError(
            f"--metrics must be a port or ADDRESS:PORT, as 9464 or 0.0.0.0:9464, but got {text!r}."
        )
    return address.strip("[]") or ADDRESS, int(port)


class _Collector:
    def __init__(self, look: Callable[[], Figures], loop: asyncio.AbstractEventLoop) -> None:
        self._look = look
        self._loop = loop

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        async def look() -> Figures:
            return self._look()

        # This is a thread of the HTTP server, and the state may be read in the loop only.
        asked = asyncio.run_coroutine_threadsafe(look(), self._loop)
        return tuple(metrics(asked.result(ANSWER_SECONDS)))


def metrics(figures: Figures) -> Iterator[Metric]:
    """Figures as metrics of Prometheus; a study is named by its name."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    devices = GaugeMetricFamily(f"{_P}_devices", "Devices by state.", labels=["state"])
    states = Counter(map(_device_state, figures.status.devices))
    for state in ("free", "running", "yielding", "unhealthy", "unpowered"):
        devices.add_metric([state], states[state])
    yield devices
    clients = GaugeMetricFamily(f"{_P}_clients", "Connected processes by role.", labels=["role"])
    for role, count in sorted(Counter(figures.roles).items()):
        clients.add_metric([role], count)
    yield clients
    yield from _of_studies(figures.status.studies)
    yield CounterMetricFamily(
        f"{_P}_reports", "Values that trials have reported.", value=figures.meter.reports
    )
    yield _histogram(
        f"{_P}_decision_seconds",
        "From an event that may move a device to the answer.",
        figures.meter.decisions,
    )
    yield _histogram(
        f"{_P}_ledger_write_seconds", "Transactions with a ledger.", figures.meter.ledger_writes
    )


_P = "optuna_hermes"
_COUNTED = {
    "switches": ("switches", "Suspended trials that were brought back."),
    "device_seconds": ("spent_seconds", "Device time that leases have had."),
}
"""Counters of each study since its driver came: name, field of ``StudyStatus``, meaning."""


def _of_studies(studies: Sequence[wire.StudyStatus]) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    # Two studies of one name, in two databases, are one line: a label may not stand twice.
    names = sorted({study.name for study in studies})
    of_name = {name: [study for study in studies if study.name == name] for name in names}
    trials = GaugeMetricFamily(f"{_P}_trials", "Trials by state.", labels=["study", "state"])
    for name, same in of_name.items():
        for state in wire.TrialCounts.__struct_fields__:
            trials.add_metric([name, state], sum(getattr(each.counts, state) for each in same))
    yield trials
    overheads = CounterMetricFamily(
        f"{_P}_overhead_seconds", "Device time outside of batches.", labels=["study", "kind"]
    )
    for name, same in of_name.items():
        for kind in get_args(OverheadKind):
            seconds = sum(each.overhead_seconds[kind] for each in same)
            overheads.add_metric([name, kind], seconds)
    yield overheads
    for metric, (figure, meaning) in _COUNTED.items():
        counter = CounterMetricFamily(f"{_P}_{metric}", meaning, labels=["study"])
        for name, same in of_name.items():
            counter.add_metric([name], sum(getattr(each, figure) for each in same))
        yield counter


def _device_state(device: wire.DeviceStatus) -> str:
    if device.holder is not None:
        return device.holder.state
    if device.problem or not device.healthy:
        return "unhealthy"
    return "free" if device.power == "on" else "unpowered"


def _histogram(name: str, meaning: str, times: Times) -> Metric:
    from prometheus_client.core import HistogramMetricFamily

    bounds = [*map(str, BOUNDS_SECONDS), "+Inf"]
    sums = [sum(times.counts[: i + 1]) for i in range(len(bounds))]
    buckets = list(zip(bounds, sums, strict=True))
    return HistogramMetricFamily(name, meaning, buckets=buckets, sum_value=times.total_seconds)
