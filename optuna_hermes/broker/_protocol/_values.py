"""Parts of messages."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from optuna_hermes.model import Count, Seconds

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
        sets_up: whether new trials may be set up before there is a device for them.
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
    sets_up: bool = False
