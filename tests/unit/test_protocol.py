"""Frames: what goes out comes in, and rubbish is refused."""

from __future__ import annotations

import contextlib
import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.errors import ProtocolError
from optuna_hermes.model import MOST_SIZES, BatchSizes, Checkpoint
from support.statuses import broker_status, device_status, study_status

CHECKPOINT = {"path": "/c", "units": 1, "size_bytes": 1, "sha256": "0"}
SIZES = {"now": 1, "least": 1, "most": 1}
MANY = {size: 1.0 for size in range(1, MOST_SIZES + 2)}

numbers = st.integers(0, 2**40)
values = st.floats(allow_nan=False)
tiers = st.sampled_from(["resident", "host", "disk"])
seconds = st.floats(0, 1e9)
keys = st.text(min_size=1, max_size=255)
checkpoints = st.builds(
    Checkpoint,
    path=st.text(),
    units=numbers,
    size_bytes=numbers,
    sha256=st.text(max_size=64),
)
specs = st.builds(
    wire.StudySpec, key=keys, name=st.text(), ledger_url=st.text(), slice_seconds=seconds
)
params = st.dictionaries(
    st.text(), st.none() | st.booleans() | st.integers(-(2**63), 2**63) | values | st.text()
)
reports = st.builds(
    wire.Report,
    epoch=numbers,
    unit=st.integers(1, 2**40),
    step=numbers,
    value=values,
    units_left=st.none() | numbers,
    params=params,
    age_seconds=seconds,
)
parkings = st.builds(
    wire.TierChanged,
    epoch=numbers,
    tier=tiers,
    suspend_seconds=seconds,
    checkpoint=st.none() | checkpoints,
    held_bytes=st.none() | numbers,
    host_bytes=numbers,
    can_store=st.booleans(),
    can_offload=st.booleans(),
)
sizes = st.builds(
    BatchSizes,
    now=st.integers(1, 2**40),
    least=st.integers(1, 2**40),
    most=st.integers(1, 2**40),
    seconds=st.dictionaries(st.integers(1, 2**40), seconds, max_size=MOST_SIZES),
    unit_samples=st.none() | st.integers(1, 2**40),
)
from_client = st.one_of(
    st.builds(wire.Hello, version=numbers, role=st.text()),
    st.builds(
        wire.OpenStudy,
        study=specs,
        limit=st.none() | numbers,
        max_alive=numbers,
        ended=st.dictionaries(numbers, st.sampled_from(["done", "failed"])),
        adopted=st.dictionaries(numbers, numbers),
        foreign=st.tuples(numbers),
        waiting=st.tuples(numbers),
        counted=st.none()
        | st.builds(
            wire.Counted,
            switches=numbers,
            overhead_seconds=st.dictionaries(st.sampled_from(["idle", "opening"]), seconds),
            spent_seconds=seconds,
        ),
    ),
    st.builds(wire.Register, study=specs, number=numbers, trial_id=numbers),
    st.builds(wire.Describe, study=keys, params=st.dictionaries(numbers, params)),
    st.builds(wire.FirstBatch, epoch=numbers, can_store=st.booleans(), params=params),
    reports,
    st.builds(wire.Beat, epoch=numbers, memory_bytes=st.none() | numbers, sizes=st.none() | sizes),
    parkings,
    st.builds(
        wire.Reattach,
        study=specs,
        epoch=numbers,
        devices=st.lists(st.text(), min_size=1, max_size=2).map(tuple),
        number=st.none() | numbers,
        trial_id=st.none() | numbers,
        held_seconds=seconds,
        training=st.booleans(),
        requested_tier=st.none() | tiers,
        can_store=st.booleans(),
        need_bytes=st.none() | numbers,
        units_left=st.none() | numbers,
        params=params,
        reports=st.tuples(reports),
        checkpoints=st.tuples(checkpoints, checkpoints),
        parked=st.none() | parkings,
        sizes=st.none() | sizes,
    ),
    st.builds(wire.Released, epoch=numbers, reason=st.text(), outgrown=st.booleans()),
    st.builds(wire.Ended, epoch=numbers, state=st.sampled_from(["done", "failed"])),
    st.builds(wire.KeepWorkers, study=keys, max_alive=numbers),
    st.builds(wire.GiveUp, study=st.just("s"), number=numbers, reason=st.text()),
)
statuses = st.builds(
    broker_status,
    st.builds(
        study_status,
        key=keys,
        unstarted=st.none() | numbers,
        outage_seconds=st.none() | seconds,
        held=st.lists(numbers),
        trials=st.lists(
            st.fixed_dictionaries(
                {"trial": numbers, "tier": st.none() | tiers, "curve": st.lists(st.none() | values)}
            )
        ),
    ),
    devices=st.lists(st.builds(device_status, id=st.text(), energy_joules=st.none() | seconds)),
)
from_broker = st.one_of(
    st.builds(wire.Refused, reason=st.text(), taken=st.booleans()),
    st.builds(
        wire.Grant,
        epoch=numbers,
        devices=st.tuples(st.text()),
        alone=st.booleans(),
        number=st.none() | numbers,
        checkpoints=st.tuples(checkpoints),
        batch_size=st.none() | numbers,
    ),
    st.builds(wire.Resize, epoch=numbers, batch_size=numbers),
    st.builds(wire.Yield, epoch=numbers, tier=tiers),
    st.builds(wire.Move, epoch=numbers, tier=tiers),
    st.builds(wire.Prepare, number=numbers, checkpoints=st.tuples(checkpoints, checkpoints)),
    st.builds(wire.Status, status=statuses),
    st.builds(
        wire.StudyChanged,
        study=st.builds(study_status, key=keys, spent_seconds=seconds),
        devices=st.tuples(st.builds(device_status, id=st.text())),
        leased=numbers,
        is_answer=st.booleans(),
    ),
)


def body(data: bytes) -> bytes:
    length = wire.body_length(data[: wire.HEADER_BYTES])
    assert len(data) == wire.HEADER_BYTES + length
    return data[wire.HEADER_BYTES :]


@given(from_client)
def test_a_clients_message_comes_in_as_it_went_out(message: wire.FromClient) -> None:
    """Every field survives."""
    assert wire.decode_from_client(body(wire.frame(message))) == message


@given(from_broker)
def test_a_brokers_message_comes_in_as_it_went_out(message: wire.FromBroker) -> None:
    """Every field survives."""
    assert wire.decode_from_broker(body(wire.frame(message))) == message


@given(st.binary(max_size=300))
def test_bytes_are_a_message_or_refused(data: bytes) -> None:
    """No bytes raise anything but ``ProtocolError``."""
    for decode in (wire.decode_from_client, wire.decode_from_broker):
        with contextlib.suppress(ProtocolError):
            decode(data)


@given(from_client, st.data())
def test_a_damaged_message_is_a_message_or_refused(
    message: wire.FromClient, data: st.DataObject
) -> None:
    """A flipped byte or a cut end never raises anything but ``ProtocolError``."""
    good = bytearray(body(wire.frame(message)))
    good[data.draw(st.integers(0, len(good) - 1))] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.integers(0, len(good)))
    with contextlib.suppress(ProtocolError):
        wire.decode_from_client(bytes(good[:cut]))


@pytest.mark.parametrize("header", [b"\x00\x00\x00\x00", b"\xff\xff\xff\xff"])
def test_lengths_out_of_range_are_refused(header: bytes) -> None:
    """Nobody makes the broker wait for four gigabytes, or for nothing."""
    with pytest.raises(ProtocolError, match="bytes"):
        wire.body_length(header)


def test_the_longest_frame_that_is_sent_is_read() -> None:
    """Sender and receiver agree on the limit."""
    reason = "x" * wire.MAX_FRAME_BYTES
    head = len(wire.frame(wire.Refused(reason=reason[:-100]))) - (len(reason) - 100)
    longest = wire.frame(wire.Refused(reason=reason[head - wire.HEADER_BYTES :]))
    assert wire.body_length(longest[: wire.HEADER_BYTES]) == wire.MAX_FRAME_BYTES


def test_a_frame_that_is_too_long_is_not_sent() -> None:
    """The sender learns what the receiver would refuse."""
    with pytest.raises(ProtocolError, match="at most"):
        wire.frame(wire.Refused(reason="x" * wire.MAX_FRAME_BYTES))


def test_unknown_types_are_refused() -> None:
    """A message of a later version is no message."""
    with pytest.raises(ProtocolError):
        wire.decode_from_client(msgspec.msgpack.encode({"type": "Surprise"}))


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "TierChanged", "epoch": 1, "tier": "host", "suspend_seconds": float("nan")},
        {
            "type": "TierChanged",
            "epoch": 1,
            "tier": "host",
            "suspend_seconds": 0.0,
            "host_bytes": -1,
        },
        {"type": "Report", "epoch": 1, "unit": 0, "step": 1, "value": 0.5},
        {"type": "Report", "epoch": 1, "unit": 1, "step": 2**63, "value": 0.5},
        {"type": "Ended", "epoch": 1, "state": "running"},
        {"type": "Ready", "study": "k" * 256},
        {"type": "Saved", "epoch": 1, "checkpoint": {**CHECKPOINT, "path": "/" * 4097}},
        {"type": "Saved", "epoch": 1, "checkpoint": {**CHECKPOINT, "size_bytes": 2**54}},
        {"type": "Beat", "epoch": 1, "sizes": {**SIZES, "now": 0}},
        {"type": "Beat", "epoch": 1, "sizes": {**SIZES, "seconds": MANY}},
    ],
    ids=[
        *("no time", "less than nothing", "unit 0", "beyond a database", "not an end", "long"),
        *("long path", "large file", "empty batch", "many sizes"),
    ],
)
def test_numbers_that_cannot_be_are_refused(fields: dict[str, object]) -> None:
    """Numbers that no client measures cannot upset sums, promises of memory or ledger columns."""
    with pytest.raises(ProtocolError):
        wire.decode_from_client(msgspec.msgpack.encode(fields))


@pytest.mark.parametrize(
    "data",
    [
        b"\xdf\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\x81\xa4type\xdb\xff\xff\xff\xff",
        b"\x82\xa4type\xa8Describe\xa6params" + b"\x81\x01" * 1_000_000,
    ],
    ids=["map", "list", "text", "depth"],
)
def test_lengths_inside_of_a_message_are_not_believed(data: bytes) -> None:
    """Data that announces four gigabytes, or nests without end, costs no more than it is long."""
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            wire.decode_from_client(data)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_what_a_later_version_adds_is_left_out() -> None:
    """A field that is not known is no error."""
    data = msgspec.msgpack.encode({"type": "Ready", "study": "s", "colour": "blue"})
    assert wire.decode_from_client(data) == wire.Ready(study="s")
