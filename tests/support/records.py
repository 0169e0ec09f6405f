"""Records and operations for tests of ledgers, and the content to compare afterwards.

A ledger serves many examples, so each has a study, hosts and brokers of its own, and epochs that
continue from the last epoch of the example before.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from optuna_hermes.errors import NotOwnerError, StaleEpochError, StudyFullError
from optuna_hermes.ledger import (
    CheckpointRecord,
    EventRecord,
    HostRecord,
    LeaseRecord,
    Ledger,
    ReportRecord,
    TrialRecord,
)
from optuna_hermes.model import Checkpoint

STUDY = "study"
OTHER = "another study"
UNICODE = "größe 学習 🌱 'quoted' \"%s\" \\"

Operation = tuple[str, tuple[Any, ...]]

_REFUSALS = (NotOwnerError, StaleEpochError, StudyFullError)
_EVERY_BROKER, _NO_BROKER = 0.0, 1e9  # count as gone, by the age of the heartbeat in seconds


@contextmanager
def locked(file: Path, study: str) -> Iterator[None]:
    """Lock a study of a ledger's file as the broker of another process does."""
    folder = Path(f"{file}.hermes")
    folder.mkdir(mode=0o700, exist_ok=True)
    with (folder / f"{study}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def trial_record(number: int = 0, **fields: Any) -> TrialRecord:
    """A trial, with defaults for fields that the test does not set."""
    defaults: dict[str, Any] = {"study": STUDY, "trial_id": number, "state": "pending"}
    return TrialRecord(**{**defaults, **fields}, number=number)


def report(unit: int, value: float, *, number: int = 0, **fields: Any) -> ReportRecord:
    """A report of a trial that takes a second and ten steps for each unit."""
    defaults = {"study": STUDY, "step": unit * 10, "device_seconds": float(unit), "at": 0.0}
    return ReportRecord(**{**defaults, **fields}, number=number, unit=unit, value=value)


def lease(epoch: int, *, number: int | None = 0, **fields: Any) -> LeaseRecord:
    """A live lease of one device."""
    defaults = {"study": STUDY, "devices": ("a/cpu:0",), "host": "a", "started": 1.5}
    return LeaseRecord(**{**defaults, **fields}, number=number, epoch=epoch)


def checkpoint(path: str, *, number: int = 0, **fields: Any) -> CheckpointRecord:
    """A record of a checkpoint at a path."""
    return CheckpointRecord(
        **{"study": STUDY, "at": 2.5, **fields},
        number=number,
        checkpoint=Checkpoint(path=path, units=3, size_bytes=2**40, sha256="0" * 64),
    )


def event(kind: str, *, number: int | None = 0, **fields: Any) -> EventRecord:
    """An event."""
    return EventRecord(**{"study": STUDY, "at": 3.5, **fields}, number=number, kind=kind)


def host(instance: str, *, name: str = "a", **fields: Any) -> HostRecord:
    """A broker with two devices."""
    return HostRecord(name=name, instance=instance, **{"devices": ("0", "1"), **fields})


def content(ledger: Ledger, study: str) -> str:
    """All records of a study in a ledger; as text, because NaN does not equal itself."""
    return repr(
        (
            ledger.load_trials(study),
            ledger.load_overrides(study),
            ledger.load_curves(study),
            ledger.load_checkpoints(study),
            [ledger.load_checkpoints(study, [number]) for number in range(3)],
            ledger.load_memory(study),
            ledger.load_events(study),
            [ledger.load_events(study, number) for number in range(3)],
            study in ledger.load_studies(),
            [
                replace(host, age_seconds=0.0)
                for host in ledger.load_hosts()
                if host.name.startswith(f"{study} ")
            ],
        )
    )


def leases(ledger: Ledger, study: str, base: int) -> list[LeaseRecord]:
    """Leases with epochs relative to ``base``."""
    return [replace(held, epoch=held.epoch - base) for held in ledger.load_leases(study)]


def apply(ledger: Ledger, study: str, base: int, operation: Operation) -> str:
    """Carry out one operation; return its answer as text, or the name of the error."""
    verb, arguments = operation
    try:
        return repr(_carry_out(ledger, study, base, verb, *arguments))
    except _REFUSALS as error:
        return type(error).__name__


def _carry_out(ledger: Ledger, study: str, base: int, verb: str, *arguments: Any) -> Any:
    act: Any = getattr(ledger, verb)
    first, *others = arguments
    if verb in ("name_lease", "end_lease"):
        return act(base + first, *others)
    if verb in ("save_memory", "trim_events"):
        return act(study, first)
    if verb == "forget_study":
        return act(study)
    if verb in ("save_override", "drop_checkpoint"):
        return act(study, first, *others)
    if verb == "forget_host":
        return act(_named(study, first), dead_after_seconds=others[0])
    if verb == "claim_trial":
        host, instance = (_named(study, name) for name in others[:2])
        return act(study, first, host=host, instance=instance, dead_after_seconds=others[2])
    if verb == "commit_lease":
        return act(_placed(study, replace(first, epoch=base + first.epoch)), limit=others[0])
    if verb == "save_trial":
        return act(_placed(study, first), by=_named(study, others[0]))
    if verb == "beat":
        name, instance = _named(study, first.name), _named(study, first.instance)
        return act(replace(first, name=name, instance=instance))
    return act(replace(first, study=study))


def _placed(study: str, record: Any) -> Any:
    host, owner = _named(study, record.host), _named(study, record.owner)
    return replace(record, study=study, host=host, owner=owner)


def _named(study: str, name: str | None) -> str | None:
    return None if name is None else f"{study} {name}"


# SQLite keeps no sign of a zero; adding 0.0 takes it away beforehand.
_finite = st.floats(allow_nan=False, allow_infinity=False).map(lambda number: number + 0.0)
_values = st.floats(width=64).map(lambda number: number + 0.0)
# PostgreSQL takes neither NUL nor half of a surrogate pair.
_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
_numbers = st.integers(0, 2)
_big = st.integers(0, 2**62)
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | _finite | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_text, inner, max_size=3),
    max_leaves=5,
)
_paths = st.sampled_from(["/a", "/A", "/b", "/ü"])
_epochs = st.integers(-1, 6)
_hosts = st.sampled_from(["a", "b"])
_instances = st.sampled_from(["a1", "a2", "b1"])
_owners = st.sampled_from([None, None, "a1", "b1"])
_overrides = st.sampled_from([None, "held", "boosted", "finishing"])
_silences = st.sampled_from([_EVERY_BROKER, _NO_BROKER])

_runs = st.builds(
    TrialRecord,
    study=st.just(""),
    number=_numbers,
    trial_id=_big,
    state=st.sampled_from(["pending", "running", "parked", "stored", "done", "failed"]),
    tier=st.sampled_from([None, "resident", "host", "disk"]),
    host=st.none() | _hosts,
    owner=_owners,
    units=_big,
    slices=_big,
    suspensions=_big,
    device_seconds=_finite,
    submitted=_finite,
    updated=_finite,
)
_reports = st.builds(
    ReportRecord,
    study=st.just(""),
    number=_numbers,
    unit=st.integers(1, 4),
    step=_big,
    value=_values,
    device_seconds=_finite,
    at=_finite,
)
_new_leases = st.builds(
    LeaseRecord,
    study=st.just(""),
    epoch=_epochs,
    number=st.none() | _numbers,
    devices=st.lists(_text, max_size=3).map(tuple),
    host=_hosts,
    started=_finite,
    ended=st.none() | st.floats(1.0, 2.0),
    owner=_owners,
)
_checkpoints = st.builds(
    CheckpointRecord,
    study=st.just(""),
    number=_numbers,
    checkpoint=st.builds(
        Checkpoint,
        path=_paths,
        units=_big,
        size_bytes=_big,
        sha256=st.text("0123456789abcdef", min_size=64, max_size=64),
    ),
    at=_finite,
)
_events = st.builds(
    EventRecord,
    study=st.just(""),
    number=st.none() | _numbers,
    kind=_text,
    at=_finite,
    detail=st.dictionaries(_text, _json, max_size=3),
)
_brokers = st.builds(
    HostRecord,
    name=_hosts,
    instance=_instances,
    devices=st.lists(_text, max_size=3).map(tuple),
    load=_finite,
)
operations = st.one_of(
    st.tuples(st.just("save_trial"), st.tuples(_runs, _owners)),
    st.tuples(st.just("claim_trial"), st.tuples(_numbers, _hosts, _instances, _silences)),
    st.tuples(st.just("save_override"), st.tuples(_numbers, _overrides)),
    st.tuples(st.just("add_report"), st.tuples(_reports)),
    st.tuples(st.just("commit_lease"), st.tuples(_new_leases, st.none() | st.integers(0, 3))),
    st.tuples(st.just("name_lease"), st.tuples(_epochs, _numbers)),
    st.tuples(st.just("end_lease"), st.tuples(_epochs, st.none() | st.floats(1.0, 2.0))),
    st.tuples(st.just("save_checkpoint"), st.tuples(_checkpoints)),
    st.tuples(st.just("drop_checkpoint"), st.tuples(_numbers, _paths)),
    st.tuples(st.just("save_memory"), st.tuples(_json)),
    st.tuples(st.just("add_event"), st.tuples(_events)),
    st.tuples(st.just("trim_events"), st.tuples(_finite)),
    st.tuples(st.just("beat"), st.tuples(_brokers)),
    st.tuples(st.just("forget_host"), st.tuples(_instances, _silences)),
    st.tuples(st.just("forget_study"), st.tuples(st.none())),
)
"""One call of a method that writes, with its arguments."""
