"""A broker's figures in Prometheus' words."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from prometheus_client import CollectorRegistry, generate_latest

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker._core._events import Received, Tick
from optuna_hermes.broker._server._metrics import BOUNDS_SECONDS, Meter, Seen, metrics, serving
from optuna_hermes.errors import InvalidInputError
from support.broker import FakeBroker


def look(broker: FakeBroker) -> Seen:
    status = broker.handler.status(broker.now, trials=False)
    return status, tuple(role for _, role in broker.handler.state.processes)


def scraped(given: Seen) -> dict[str, float]:
    """Samples by name and labels, as a scrape shows them."""

    class Collector:
        def collect(self) -> Any:
            return metrics(*given)

    registry = CollectorRegistry()
    registry.register(Collector())
    return samples(registry)


def samples(registry: CollectorRegistry) -> dict[str, float]:
    lines = generate_latest(registry).decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def begin(broker: FakeBroker, worker: int, number: int) -> int:
    epoch: int = broker.last(worker, "Grant").epoch
    broker.say(worker, wire.Begin(epoch=epoch, number=number, trial_id=number))
    broker.say(worker, wire.FirstBatch(epoch=epoch, can_store=True))
    return epoch


def test_devices_trials_and_clients_are_counted() -> None:
    """By state and by role; a state that nothing is in is zero, not missing."""
    broker = FakeBroker(devices=2)
    broker.driver(key="digits", unstarted=1)
    begin(broker, broker.worker(key="digits"), 0)
    broker.poll("cpu:1", healthy=False)
    broker.advance(1.0)
    seen = scraped(look(broker))
    assert seen['optuna_hermes_devices{state="running"}'] == 1
    assert seen['optuna_hermes_devices{state="unhealthy"}'] == 1
    assert seen['optuna_hermes_devices{state="free"}'] == 0
    assert seen['optuna_hermes_trials{state="running",study="digits"}'] == 1
    assert seen['optuna_hermes_trials{state="parked",study="digits"}'] == 0
    assert seen['optuna_hermes_clients{role="driver"}'] == 1
    assert seen['optuna_hermes_clients{role="worker"}'] == 1
    assert seen['optuna_hermes_device_seconds_total{study="digits"}'] == 1.0


def test_a_process_with_two_connections_is_counted_once() -> None:
    """As that which calls ``optimize``, whose first one keeps the broker while it imports."""
    broker = FakeBroker()
    for pid in (7, 7, 8):
        broker.connect("driver", pid=pid)
    assert scraped(look(broker))['optuna_hermes_clients{role="driver"}'] == 2


def test_a_device_is_free_only_if_it_can_be_granted() -> None:
    """Not while a process of no trial computes on it, nor without power."""
    broker = FakeBroker(devices=3)
    broker.poll("cpu:1", free=False, problem="process 7 of no trial computes on it")
    seen = scraped(look(broker))
    assert seen['optuna_hermes_devices{state="unhealthy"}'] == 1
    assert seen['optuna_hermes_devices{state="free"}'] == 2
    assert seen['optuna_hermes_devices{state="unpowered"}'] == 0
    broker.handler.state.slots["cpu:2"].power = "off"
    seen = scraped(look(broker))
    assert seen['optuna_hermes_devices{state="free"}'] == 1
    assert seen['optuna_hermes_devices{state="unpowered"}'] == 1


def test_switches_and_their_cost_are_counted() -> None:
    """They are those of the status, by study."""
    broker = FakeBroker(devices=1)
    broker.driver(key="digits", unstarted=1)
    worker = broker.worker(key="digits")
    epoch = begin(broker, worker, 0)
    parked = wire.TierChanged(epoch=epoch, tier="resident", suspend_seconds=0.5, can_store=True)
    broker.say(worker, parked)
    broker.advance(0.25)
    again = broker.last(worker, "Grant").epoch
    broker.say(worker, wire.FirstBatch(epoch=again, can_store=True))
    seen = scraped(look(broker))
    assert seen['optuna_hermes_switches_total{study="digits"}'] == 1
    overhead = "optuna_hermes_overhead_seconds_total"
    kinds = {"idle": 0.0, "opening": 0.0, "resuming": 0.25, "saving": 0.0, "suspending": 0.5}
    for kind, seconds in kinds.items():
        found = seen[f'{overhead}{{kind="{kind}",study="digits"}}']
        assert found == pytest.approx(seconds)


def test_studies_of_one_name_are_one_line() -> None:
    """Two databases may hold studies of one name: a line may not stand twice in a scrape."""
    broker = FakeBroker(devices=1)
    broker.driver(key="a")
    status, roles = look(broker)
    (study,) = status.studies
    other = structs.replace(study, key="b", counts=structs.replace(study.counts, done=3))
    seen = scraped((structs.replace(status, studies=(study, other)), roles))
    assert seen['optuna_hermes_trials{state="done",study="a"}'] == 3


def test_a_histogram_counts_every_duration_once() -> None:
    """Bins add up, a bound belongs to its own bin, and the last bin holds them all."""
    registry = CollectorRegistry()
    meter = Meter(registry)
    for seconds in (0.0, BOUNDS_SECONDS[0], 0.02, 99.0):
        meter.ledger_writes.observe(seconds)
    seen = samples(registry)
    name = "optuna_hermes_ledger_write_seconds"
    assert seen[name + '_bucket{le="0.0005"}'] == 2
    assert seen[name + '_bucket{le="0.025"}'] == 3
    assert seen[name + '_bucket{le="+Inf"}'] == seen[name + "_count"] == 4
    assert seen[name + "_sum"] == pytest.approx(99.0205)
    assert name + "_created" not in seen


def test_reports_are_no_decisions() -> None:
    """Reports are counted and beats are not; what else happens is timed."""
    registry = CollectorRegistry()
    meter = Meter(registry)
    report = wire.Report(epoch=1, unit=1, step=1, value=0.5)
    for message in (report, report, wire.Beat(epoch=1), wire.Ready(study="s")):
        meter.handled(Received(connection=1, message=message), 0.01)
    meter.handled(Tick(), 0.01)
    seen = samples(registry)
    assert seen["optuna_hermes_reports_total"] == 2
    assert seen["optuna_hermes_decision_seconds_count"] == 2


def test_names_keep_the_rules_of_prometheus() -> None:
    """Counters end in ``_total``, times in ``_seconds``, and every figure says what it is."""
    broker = FakeBroker(devices=1)
    broker.driver()
    registry = CollectorRegistry()
    Meter(registry)
    for metric in (*metrics(*look(broker)), *registry.collect()):
        assert metric.name.startswith("optuna_hermes_")
        assert metric.documentation.endswith(".")
        assert metric.type in ("counter", "gauge", "histogram")
        assert metric.type != "histogram" or metric.name.endswith("_seconds")


def serve(place: str, seen: Seen) -> None:
    async def run() -> None:
        with serving(place, lambda: seen):
            pass

    asyncio.run(run())


def test_the_files_of_another_program_stay_as_they_are(tmp_path: Path) -> None:
    """One of several processes has its figures in files, and a broker may inherit where."""
    code = (
        "import asyncio\n"
        "from optuna_hermes.broker._server._metrics import serving\n"
        "async def run():\n"
        "    with serving('127.0.0.1:{port}', None) as meter:\n"
        "        meter.ledger_writes.observe(1.0)\n"
        "asyncio.run(run())\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code.format(port=port)], env=env, check=True)
    assert list(tmp_path.iterdir()) == []


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing package is one line with the command that installs it."""
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(InvalidInputError) as caught:
        serve("9464", look(FakeBroker(devices=1)))
    assert str(caught.value) == (
        "--metrics needs prometheus-client, which is not installed: run `pip install "
        "'optuna-hermes[metrics]'`."
    )
