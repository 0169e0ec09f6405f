"""Parts of messages."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

MOST_SIZES = 64
"""Largest number of batch sizes whose speed a trial reports."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
"""A count that fits into any database and any JSON, also when some of them are added up."""

Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
"""A length of time in seconds, finite."""

Size = Annotated[int, msgspec.Meta(ge=1, le=2**53)]
"""Number of samples in a batch."""

Key = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
"""A study's key, no longer than the ledger's columns."""

Numbers = Annotated[tuple[Count, ...], msgspec.Meta(min_length=1)]
"""The trials of one override: it holds for all of them, or, where one is refused, for none."""

Ending = Literal["done", "failed"]

Params = dict[str, float | int | bool | str | None]
"""A trial's hyper-parameters as plain JSON; any other choice is its text."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of every message; the tag is the class name."""


class StudySpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Study, as a broker must know it to serve it.

    Args:
        key: the study's key, the same in every process.
        name: its name, for people.
        ledger_url: SQLAlchemy URL of its ledger.
        policy: a name of ``POLICIES``, or a class of the user's as any process finds it.
        folders: where such a class may import from.
        slice_seconds: least length of a slice.
        seed: for policies that draw random numbers.
        maximize: the values were turned round; only ``status`` turns them back.
        hang_seconds: time its workers may be silent and idle; None for the usual one.
    """

    key: Key
    name: str
    ledger_url: str
    policy: str = "hermes"
    folders: tuple[str, ...] = ()
    slice_seconds: Seconds = 1.0
    seed: int = 0
    maximize: bool = False
    hang_seconds: Seconds | None = None


class SavedCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint whose bytes are on disk, fsync included."""

    path: Annotated[str, msgspec.Meta(max_length=4096)]
    units: Count
    size_bytes: Count
    sha256: Annotated[str, msgspec.Meta(max_length=64)]


class BatchSizes(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The sizes that the batches of a trial may have, the one that they have, and its devices.

    Args:
        now: samples in its next batch.
        least: the smallest size.
        most: the largest size.
        seconds: what a batch took, by the sizes that were measured.
        unit_samples: samples in a unit, None if unknown.
        most_devices: how many devices it may be given at once; batches are those of all together.
    """

    now: Size
    least: Size
    most: Size
    seconds: Annotated[dict[Size, Seconds], msgspec.Meta(max_length=MOST_SIZES)] = {}
    unit_samples: Size | None = None
    most_devices: Size = 1

    @property
    def valid(self) -> bool:
        """True if they are in order."""
        return self.least <= self.now <= self.most
