"""Watching processes for their end."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from optuna_hermes._parent import kill
from optuna_hermes.broker._server._processes import watch

DEADLINE_SECONDS = 20.0


def _sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])


def test_the_end_of_a_process_is_told() -> None:
    """Once, and only when it has ended."""

    async def see() -> int:
        ended = asyncio.Event()
        told = 0

        def tell() -> None:
            nonlocal told
            told += 1
            ended.set()

        with _sleeper() as process:
            end = watch(process.pid, tell)
            assert end is not None
            assert told == 0
            process.kill()
            await asyncio.wait_for(ended.wait(), DEADLINE_SECONDS)
        end()
        return told

    assert asyncio.run(see()) == 1


def test_a_watch_that_is_over_leaves_the_next_one_alone() -> None:
    """The next watch has the same handle's number; ending the first again does not end it."""

    async def see() -> None:
        first_ended, second_ended = asyncio.Event(), asyncio.Event()
        with _sleeper() as first, _sleeper() as second:
            end_first = watch(first.pid, first_ended.set)
            first.kill()
            await asyncio.wait_for(first_ended.wait(), DEADLINE_SECONDS)
            end_second = watch(second.pid, second_ended.set)
            assert end_first is not None
            assert end_second is not None
            end_first()
            second.kill()
            await asyncio.wait_for(second_ended.wait(), DEADLINE_SECONDS)

    asyncio.run(see())


def test_a_process_that_cannot_be_seen_is_not_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel calls one of another container 0, and takes that for the whole group."""
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append((pid, number)))
    kill(0)
    kill(-1)
    assert killed == []
