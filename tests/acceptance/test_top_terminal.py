"""``optuna-hermes top`` in a terminal of its own, with a broker that is there."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from optuna_hermes.broker import connect_with_retry


@pytest.mark.parametrize(
    "key", [b"\x03", signal.SIGTERM, pytest.param(b"q", marks=pytest.mark.slow)]
)
def test_top_shows_the_devices_and_leaves_at_once(
    key: bytes | signal.Signals,
    start_cli: Callable[..., Any],
    wait_for: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """80 columns of a real terminal; the broker stays, and the screen is as it was before."""
    broker = start_cli("broker", "--devices", "cpu:2")
    connect_with_retry("viewer").close()
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    command = [sys.executable, "-m", "optuna_hermes", "top"]
    environment = {**os.environ, "TERM": "xterm-256color"}
    top = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, cwd=tmp_path
    )
    os.close(theirs)
    os.set_blocking(ours, False)
    seen = bytearray()

    def shows(words: bytes) -> bool:
        with contextlib.suppress(OSError):
            seen.extend(os.read(ours, 65536))
        return words in seen

    try:
        wait_for(lambda: shows(b"cpu:1"), 60, "the devices")
        top.send_signal(key) if isinstance(key, int) else os.write(ours, key)
        wait_for(lambda: shows(b"\x1b[?1049l"), 10, "the screen is given back")
        assert top.wait(10) == 0
    finally:
        top.kill()
        top.wait()
        os.close(ours)
    assert broker.process.poll() is None


@pytest.mark.parametrize("term", [None, "dumb"])
def test_top_needs_a_terminal(cli: Callable[..., Any], term: str | None) -> None:
    """In a pipe, or with TERM=dumb, there is nothing to draw on: one line says what to use."""
    if term is None:
        refused = cli("top")
    else:
        ours, theirs = pty.openpty()
        refused = subprocess.run(
            [sys.executable, "-m", "optuna_hermes", "top"],
            stdin=theirs,
            stdout=theirs,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60.0,
            env={**os.environ, "TERM": term},
        )
        os.close(ours)
        os.close(theirs)
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert "optuna-hermes status" in refused.stderr
