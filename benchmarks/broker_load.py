"""Load test of a broker with many clients: its answers, its processor time and its memory.

    python benchmarks/broker_load.py [--clients 1000] [--seconds 20] [--trials 10000] [--json]

Clients are real sockets in two processes: trials of one plain Optuna study, of which as many train
as there are devices; the others wait, or are parked. In the setting ``all`` every client says
something ten times a second, the waiting ones too; in ``holders`` only those that have a device. A
grant's time is from the moment a holder has written that it left a device to the moment another
has read that it may have it. ``status`` is the command, as a process, from its start to its end,
about a study of many runs in its ledger, with ten reports each; ``start_seconds`` is the same about
a study of one trial, most of it Python and its libraries. Exit status 1 if a limit is not met.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from _broker import broker
from _broker_load_clients import crowd
from _broker_load_status import status_rows

from optuna_hermes.broker import StudySpec, connect

PROCESSES = 2
GRANT_LIMIT_MS = 50.0
CORES_LIMIT = 1.0
MEMORY_LIMIT_BYTES = 500_000_000
STATUS_LIMIT_SECONDS = 1.0
SETTLE_SECONDS = 2.0


def main() -> int:
    options = _options()
    rows = [_load(options, setting) for setting in options.setting]
    status = status_rows(options.trials) if options.trials else []
    result = {"load": rows, "status": status, "met": _met(rows, status)}
    print(json.dumps(result, indent=1) if options.json else _text(result))
    return int(not result["met"])


# -- measuring ---------------------------------------------------------------------------------


def _load(options: argparse.Namespace, setting: str) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory(prefix="hermes-load-") as folder,
        broker(Path(folder), f"cpu:{options.devices}") as process,
        _crowds(_study(Path(folder), options), options, setting) as pipes,
    ):
        return {"setting": setting, **_measure(process, pipes, options)}


def _study(folder: Path, options: argparse.Namespace) -> StudySpec:
    return StudySpec(
        key="load",
        name="load",
        ledger_url=f"sqlite:///{folder}/ledger.db",
        policy=options.policy,
        slice_seconds=options.slice_seconds,
    )


@contextmanager
def _crowds(study: StudySpec, options: argparse.Namespace, setting: str) -> Iterator[list[Any]]:
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for i in range(PROCESSES):
        ours, theirs = context.Pipe()
        numbers = range(i * options.clients // PROCESSES, (i + 1) * options.clients // PROCESSES)
        arguments = (
            theirs,
            study,
            numbers,
            options.rate,
            options.slice_seconds,
            setting == "holders",
        )
        process = context.Process(target=crowd, args=arguments)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        for pipe in pipes:
            assert pipe.recv() == "joined"
        yield pipes
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _measure(
    process: psutil.Process, pipes: list[Any], options: argparse.Namespace
) -> dict[str, Any]:
    viewer = connect("viewer")
    viewer.ask_status(trials=False)  # all that was said before is heard now
    time.sleep(SETTLE_SECONDS)
    begin, spent = time.monotonic(), _processor_seconds(process)
    sent = sum(_ask(pipes, "look"))
    memory = 0
    while time.monotonic() < begin + options.seconds:
        memory = max(memory, process.memory_info().rss)
        time.sleep(0.2)
    sent = sum(_ask(pipes, "look")) - sent
    wall = time.monotonic() - begin
    cores = (_processor_seconds(process) - spent) / wall
    status = viewer.ask_status(trials=False)
    handles = process.num_fds()
    viewer.close()
    grants = _grant_ms(_ask(pipes, "stop"), begin)
    return {
        "clients": options.clients,
        "messages_per_second": sent / wall,
        "grants": len(grants),
        "grant_ms_median": statistics.median(grants),
        "grant_ms_99": _percentile(grants, 0.99),
        "grant_ms_max": max(grants),
        "broker_cores": cores,
        "broker_memory_bytes": memory,
        "switches": status.studies[0].switches,
        "handles": handles,
    }


def _ask(pipes: list[Any], word: str) -> list[Any]:
    for pipe in pipes:
        pipe.send(word)
    return [pipe.recv() for pipe in pipes]


def _processor_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _grant_ms(seen: list[dict[str, list[tuple[str, float]]]], begin: float) -> list[float]:
    """Milliseconds from each release of a device to the next grant of it."""
    released = sorted((at, device) for part in seen for device, at in part["released"])
    granted = sorted((at, device) for part in seen for device, at in part["granted"])
    times: dict[str, list[float]] = {}
    for at, device in granted:
        times.setdefault(device, []).append(at)
    found = []
    for at, device in released:
        following = next((each for each in times.get(device, []) if each > at), None)
        if at > begin and following is not None:
            found.append(1000 * (following - at))
    return found


def _percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


# -- reporting ---------------------------------------------------------------------------------


def _met(load: list[dict[str, Any]], status: list[dict[str, Any]]) -> bool:
    bears = all(
        row["grant_ms_99"] <= GRANT_LIMIT_MS
        and row["broker_cores"] <= CORES_LIMIT
        and row["broker_memory_bytes"] <= MEMORY_LIMIT_BYTES
        for row in load
    )
    return bears and all(row["seconds"] <= STATUS_LIMIT_SECONDS for row in status)


def _text(result: dict[str, Any]) -> str:
    lines = []
    for row in result["load"]:
        lines.append(
            f"{row['setting']:8} {row['messages_per_second']:7.0f} messages/s, grant "
            f"{row['grant_ms_median']:.1f} ms (99 %: {row['grant_ms_99']:.1f}, max "
            f"{row['grant_ms_max']:.1f}, of {row['grants']}), {row['broker_cores']:.2f} cores, "
            f"{row['broker_memory_bytes'] / 1e6:.0f} MB, {row['handles']} handles"
        )
    for row in result["status"]:
        lines.append(
            f"status   {row['trials']} trials on {row['database']}: {row['seconds']:.2f} s, "
            f"of it {row['start_seconds']:.2f} s for a study of one"
        )
    lines.append("limits met" if result["met"] else "a limit is NOT met")
    return "\n".join(lines)


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="How a broker bears a crowd.")
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--rate", type=float, default=10.0, help="messages a second of a client")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--slice-seconds", type=float, default=0.2)
    parser.add_argument("--policy", default="hermes")
    parser.add_argument("--trials", type=int, default=10_000, help="of the study of `status`")
    parser.add_argument("--setting", type=_words, default=["all", "holders"])
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
