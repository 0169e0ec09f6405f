"""Attributes that change in training: what is looked at when a trial waits."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import pytest
import torch

from optuna_hermes.suspend import _unsaved
from optuna_hermes.suspend._unsaved import Attributes


class Owner:
    """An object with a buffer of experiences, whose training makes further attributes."""

    def __init__(self) -> None:
        self.buffer = deque((n, 0.5 * n, torch.zeros(1)) for n in range(3))
        self.made: Any = None


@pytest.fixture
def owner() -> Owner:
    return Owner()


@pytest.fixture
def attributes(owner: Owner) -> Attributes:
    """The owner's attributes as before the first batch."""
    attributes = Attributes("agent", owner)
    attributes.note(attributes.classes())
    attributes.begin()
    return attributes


def test_what_the_next_process_would_lack_is_found_without_writing_the_rest(
    owner: Owner, attributes: Attributes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial asks at each suspension, and a large buffer takes long to write."""
    written, write = [], attributes._written

    def record(name: str, value: Any) -> list[Any]:
        written.append(name)
        return write(name, value)

    monkeypatch.setattr(attributes, "_written", record)
    owner.buffer.append((4, 2.0, torch.ones(1)))
    owner.made = [owner.buffer, {"a": (1, b"b", None)}]
    assert attributes.find_unmade() == set()
    assert written == []
    owner.made = threading.Lock()
    assert attributes.find_unmade() == {"agent.made"}
    assert written == ["made"]
    owner.made = None
    assert attributes.find_unmade() == set()
    assert set(attributes.state_dict()) == {"buffer", "made"}


def test_what_is_too_large_to_be_written_is_lacking(
    owner: Owner, attributes: Attributes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although it consists of numbers only."""
    monkeypatch.setattr(_unsaved, "_MOST_SIMPLE", 100)
    monkeypatch.setattr("optuna_hermes.suspend._values._MOST_PARTS", 100)
    owner.made = [[n] for n in range(200)]
    assert attributes.find_unmade() == {"agent.made"}
    assert attributes.lost == set()
