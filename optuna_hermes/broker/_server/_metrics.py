"""Figures of a broker for Prometheus."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, get_args

from optuna_hermes._extras import needed
from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._core._events import Event, Received
from optuna_hermes.errors import InvalidInputError
from optuna_hermes.model import OverheadKind

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Metric

ADDRESS = "127.0.0.1"
"""The address that serves them unless another one is asked for."""
ANSWER_SECONDS = 5.0
"""Time after which a busy broker gives no figures."""

_P = "optuna_hermes"

BOUNDS_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Upper ends of the bins of a histogram; the last bin has none."""

Seen = tuple[wire.BrokerStatus, tuple[str, ...]]
"""A broker at one moment: its status, without trials, and the role of each connected process."""


class Meter:
    """Measurements since the broker began.

    ``ledger_writes`` is a histogram of transactions with a ledger, in seconds.

    Args:
        registry: what they are registered with.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        from prometheus_client import Counter, Histogram, disable_created_metrics

        # Else each would also say since when it counts.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        histogram = partial(Histogram, buckets=BOUNDS_SECONDS, registry=registry)
        self._reports = Counter(
            f"{_P}_reports", "Values that trials have reported.", registry=registry
        )
        self._decisions = histogram(
            f"{_P}_decision_seconds", "From an event that may move a device to the answer."
        )
        self.ledger_writes = histogram(f"{_P}_ledger_write_seconds", "Transactions with a ledger.")

    def handled(self, event: Event, seconds: float) -> None:
        message = event.message if isinstance(event, Received) else None
        if isinstance(message, wire.Report):
            self._reports.inc()
        elif not isinstance(message, (wire.Beat, wire.GetStatus, wire.WatchStudy)):
            self._decisions.observe(seconds)


@contextlib.contextmanager
def serving(place: str, look: Callable[[], Seen]) -> Iterator[Meter]:
    """Serve figures, those of the meter too, over HTTP inside of this block, from a thread.

    Args:
        place: ``ADDRESS:PORT``, or a port alone.
        look: the broker as it is, called in the event loop of this thread.

    Raises:
        InvalidInputError: the extra is missing, or the place is none or cannot be had.
    """
    for name in ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"):
        os.environ.pop(name, None)  # of a program whose figures these are not
    with needed("--metrics needs prometheus-client", extra="metrics"):
        from prometheus_client import CollectorRegistry, start_http_server
    address, port = parse_place(place)
    registry = CollectorRegistry()
    registry.register(_Collector(look, asyncio.get_running_loop()))
    meter = Meter(registry)
    try:
        server, thread = start_http_server(port, addr=address, registry=registry)
    except OSError as error:
        raise InvalidInputError(
            f"--metrics must be a free port of this host but {address}:{port} is not "
            f"({error.strerror}): choose another one."
        ) from error
    try:
        yield meter
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
    def __init__(self, look: Callable[[], Seen], loop: asyncio.AbstractEventLoop) -> None:
        self._look = look
        self._loop = loop

    def collect(self) -> Iterable[Metric]:
        async def look() -> Seen:
            return self._look()

        # This is a thread of the HTTP server, and the state may be read in the loop only.
        asked = asyncio.run_coroutine_threadsafe(look(), self._loop)
        return tuple(metrics(*asked.result(ANSWER_SECONDS)))


def metrics(status: wire.BrokerStatus, roles: Sequence[str]) -> Iterator[Metric]:
    """Figures of what is seen of a broker; a study is named by its name."""
    from prometheus_client.core import GaugeMetricFamily

    devices = GaugeMetricFamily(f"{_P}_devices", "Devices by state.", labels=["state"])
    states = Counter(map(_device_state, status.devices))
    for state in ("free", "running", "yielding", "unhealthy", "unpowered"):
        devices.add_metric([state], states[state])
    yield devices
    clients = GaugeMetricFamily(f"{_P}_clients", "Connected processes by role.", labels=["role"])
    for role, count in sorted(Counter(roles).items()):
        clients.add_metric([role], count)
    yield clients
    yield from _of_studies(status.studies)


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
