"""What ``doctor`` looks at."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sqlite3
import stat
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from optuna_hermes import __version__
from optuna_hermes.cli._studies import broker_status
from optuna_hermes.errors import HermesError
from optuna_hermes.view import plural, size

State = Literal["ok", "warn", "fail"]

PYTHON_FLOOR = (3, 10)
TESTED_MAJORS = {"optuna": "5", "lightning": "2"}
"""These have private parts that this package uses, so other major versions may not do."""

REQUIRED = ("optuna", "sqlalchemy", "filelock", "msgspec", "psutil", "numpy", "typer", "rich")
OPTIONAL = {
    "torch": "to suspend PyTorch trials",
    "lightning": "for HermesCallback",
    "torchdata": "for loaders that resume in the middle of an epoch",
    "safetensors": "to write checkpoints",
    "scikit-learn": "for the quickstart",
}

COMMITS = 20
SLOW_COMMIT_SECONDS = 0.02
LITTLE_BYTES = 2 * 1024**3
TOO_LITTLE_BYTES = 200 * 1024**2


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that was looked at: what was found, and what to do if it is not ok."""

    name: str
    state: State
    found: str
    hint: str = ""


def check_all() -> list[Check]:
    """Look at everything; a check that breaks is a check that fails."""
    return [check for look in _LOOKS for check in _guarded(look)]


def _guarded(look: Callable[[], Iterator[Check]]) -> list[Check]:
    name = look.__name__.strip("_").replace("_", " ")
    try:
        return list(look())
    except HermesError as error:
        return [Check(name=name, state="fail", found=str(error))]
    except (OSError, sqlite3.Error) as error:
        hint = "The check itself did not work: see the message."
        return [Check(name=name, state="fail", found=repr(error), hint=hint)]


def _python() -> Iterator[Check]:
    good = sys.version_info >= PYTHON_FLOOR
    floor = ".".join(map(str, PYTHON_FLOOR))
    yield Check(
        name="Python",
        state="ok" if good else "fail",
        found=platform.python_version(),
        hint="" if good else f"Use Python {floor} or later.",
    )
    linux = sys.platform == "linux"
    yield Check(
        name="system",
        state="ok" if linux else "fail",
        found=platform.platform(terse=True),
        hint="" if linux else "The broker needs Linux.",
    )


def _packages() -> Iterator[Check]:
    yield Check(name="optuna-hermes", state="ok", found=__version__)
    for package in REQUIRED:
        yield _package(package, "fail", f"`python -m pip install {package}`")


def _optional_packages() -> Iterator[Check]:
    for package, purpose in OPTIONAL.items():
        hint = f"Needed {purpose}: `python -m pip install 'optuna-hermes[lightning]'`."
        yield _package(package, "warn", hint)


def _package(package: str, without: State, hint: str) -> Check:
    """A package's version; ``without`` and ``hint`` are for when it is not installed."""
    version = _version(package)
    if version is None:
        return Check(name=package, state=without, found="not installed", hint=hint)
    return _installed(package, version)


def _installed(package: str, version: str) -> Check:
    tested = TESTED_MAJORS.get(package)
    good = tested is None or version.split(".")[0] == tested
    hint = "" if good else f"Only version {tested} is tested."
    return Check(name=package, state="ok" if good else "warn", found=version, hint=hint)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _nvidia_driver() -> Iterator[Check]:
    """What ``auto`` passes over in silence, or nearly so."""
    from optuna_hermes.broker import _nvml as nvml

    try:
        with nvml.driver() as binding:
            troubles = dict(nvml.troubles(binding))
    except nvml.NoDriverError as error:
        if error.installed:
            yield Check(name="NVIDIA driver", state="warn", found="does not work", hint=str(error))
        return
    for index, words in troubles.items():
        hint = f"See `nvidia-smi -i {index}`; reset it, or restart the host."
        yield Check(name=f"GPU {index}", state="warn", found=words, hint=hint)


def _devices() -> Iterator[Check]:
    from optuna_hermes.broker._devices import Devices, parse_devices

    source = Devices(parse_devices("auto"), named=False)
    try:
        devices = source.poll()
    finally:
        source.close()
    for device in devices:
        memory = "" if device.memory_bytes is None else f", {size(device.memory_bytes)}"
        state: State = "fail" if not device.healthy else "warn" if device.problem else "ok"
        yield Check(
            name=f"device {device.id}",
            state=state,
            found=("healthy" if device.healthy else "not healthy") + memory,
            hint=device.problem,
        )
    gpus = [device for device in devices if device.kind == "gpu"]
    torch = _version("torch") or ""
    if gpus and torch.endswith("+cpu"):
        hint = "Install a build of torch with CUDA, or say --devices cpu:2."
        yield Check(name="torch and GPUs", state="warn", found=f"torch {torch}", hint=hint)


def _runtime_folder() -> Iterator[Check]:
    from optuna_hermes.broker._election import runtime_dir

    path = runtime_dir()
    status = path.stat()
    found = f"{path}, uid {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}"
    yield Check(name="runtime folder", state="ok", found=found)


def _broker() -> Iterator[Check]:
    document = broker_status()
    if document is None:
        yield Check(name="broker", state="ok", found="none runs; `optimize` starts one")
        return
    found = (
        f"{plural(len(document['devices']), 'device')}, "
        f"{plural(len(document['studies']), 'study', 'studies')}"
    )
    problems = [entry["problem"] for entry in document["studies"] if entry["problem"]]
    state: State = "warn" if problems else "ok"
    yield Check(name="broker", state=state, found=found, hint="; ".join(problems))


def _database() -> Iterator[Check]:
    """What a commit of SQLite costs in this folder: the ledger makes one for every lease."""
    here = Path.cwd()
    with tempfile.TemporaryDirectory(dir=here if os.access(here, os.W_OK) else None) as folder:
        seconds = statistics.median(_commits(Path(folder, "doctor.db")))
    slow = seconds > SLOW_COMMIT_SECONDS
    yield Check(
        name="SQLite commit",
        state="warn" if slow else "ok",
        found=f"{1000 * seconds:.1f} ms in this folder",
        hint="Put the study on a local disk, or use longer slices." if slow else "",
    )


def _commits(path: Path) -> Iterator[float]:
    connection = sqlite3.connect(path)
    try:
        connection.execute("create table entries (number integer)")
        for number in range(COMMITS):
            begin = time.perf_counter()
            connection.execute("insert into entries values (?)", (number,))
            connection.commit()
            yield time.perf_counter() - begin
    finally:
        connection.close()


def _room() -> Iterator[Check]:
    memory = psutil.virtual_memory().available
    yield _enough("free memory", memory, "A worker with torch takes about 1 GiB.")
    disk = psutil.disk_usage(str(Path.cwd())).free
    yield _enough("free disk here", disk, "Suspended trials are kept on disk; `gc` frees some.")


def _enough(name: str, n_bytes: int, hint: str) -> Check:
    state: State = "ok"
    if n_bytes < LITTLE_BYTES:
        state = "fail" if n_bytes < TOO_LITTLE_BYTES else "warn"
    return Check(name=name, state=state, found=size(n_bytes), hint="" if state == "ok" else hint)


_LOOKS = (
    _python,
    _packages,
    _optional_packages,
    _nvidia_driver,
    _devices,
    _runtime_folder,
    _broker,
    _database,
    _room,
)
