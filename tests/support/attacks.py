"""``python tests/support/attacks.py``: a process that attacks a broker's socket.

The broker may kill it for its messages; the test then starts another one. Every second it
prints one line of JSON: counts of its actions since the line before.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.model import BatchSizes, Checkpoint

_MANY = 64
"""Most connections left open at once; the oldest is closed first."""

_PATIENCE_SECONDS = 0.05


def any_message(random: Random, folder: Path) -> wire.FromClient:
    """A well-formed message that is probably invalid in the broker's state."""
    number, epoch = random.randrange(50), random.randrange(1, 60)
    key = f"attack-{random.randrange(6)}"
    url = random.choice([f"sqlite:///{folder / 'attack.db'}", "sqlite:////dev/null/l.db", ""])
    spec = wire.StudySpec(
        key=key,
        name="\N{SKULL}",
        ledger_url=url,
        policy=random.choice(["fifo", "round-robin", "hermes", "astrology", "os:system"]),
        folders=random.choice([(), ("/no/such/folder",)]),
        slice_seconds=random.choice([0.0, 0.01, 1e9]),
    )
    checkpoint = Checkpoint(
        path=random.choice(["/c", "../../c", "c\0", "c" * 4096]),
        units=number,
        size_bytes=2**53,
        sha256="0",
    )
    params: wire.Params = {"lr": float("nan"), "x": 2**63, "y" * 100: None}
    messages: list[wire.FromClient] = [
        wire.Hello(version=wire.VERSION, role="worker"),
        wire.OpenStudy(
            study=spec,
            limit=random.choice([None, 0, 3]),
            max_alive=random.choice([0, 8, 2**53]),
            ended={number: "done"},
            adopted={number: epoch},
        ),
        wire.Describe(study=key, params={n: params for n in range(number)}),
        wire.Ready(study=key),
        wire.Register(study=spec, number=number, trial_id=number),
        wire.Begin(epoch=epoch, number=number, trial_id=number),
        wire.FirstBatch(epoch=epoch, can_store=True, params=params),
        wire.Report(
            epoch=epoch,
            unit=random.choice([1, 2, 2**53]),
            step=2**53,
            value=random.choice([0.5, float("nan"), float("-inf")]),
            units_left=random.choice([None, 0, 2**53]),
            params=params,
        ),
        wire.Beat(epoch=epoch, memory_bytes=2**53),
        wire.Beat(
            epoch=epoch,
            sizes=BatchSizes(
                now=random.choice([1, 2**53]), least=8, most=4, seconds={1: 0.0, 2**53: 1e9}
            ),
        ),
        wire.Saved(epoch=epoch, checkpoint=checkpoint),
        wire.TierChanged(
            epoch=epoch,
            tier=random.choice(["resident", "host", "disk"]),
            suspend_seconds=random.choice([0.0, 1e9]),
            checkpoint=random.choice([None, checkpoint]),
            held_bytes=random.choice([None, 0, 2**53]),
            host_bytes=random.choice([0, 2**53]),
            can_store=random.random() < 0.5,
            can_offload=random.random() < 0.5,
        ),
        wire.Ended(epoch=epoch, state="failed", error="\N{SKULL}" * 1000),
        wire.Released(epoch=epoch, reason="\0", outgrown=random.random() < 0.5),
        wire.KeepWorkers(study=key, max_alive=random.choice([0, 8, 2**53])),
        wire.Drain(study=random.choice([key, "honest"])),
        wire.GiveUp(study=random.choice([key, "honest"]), number=0, reason="so"),
        wire.GetStatus(),
        wire.WatchStudy(study=random.choice([key, "honest"]), now=random.random() < 0.5),
    ]
    return random.choice(messages)


def broken_frame(random: Random, folder: Path) -> bytes:
    """Bytes that are not a frame, not a message, or an incomplete one."""
    good = bytearray(wire.frame(any_message(random, folder)))
    flipped = good.copy()
    for _ in range(random.randint(1, 4)):
        flipped[random.randrange(len(flipped))] ^= 1 << random.randrange(8)
    depth = random.choice([100, 100_000])
    deep = b"\x82\xa4type\xa8Describe\xa6params" + b"\x81\x01" * depth
    wrong = msgspec.msgpack.encode({"type": "Report", "epoch": "one", "unit": [], "more": {}})
    return random.choice(
        [
            b"\x00" * 4,
            b"\xff" * 4 + random.randbytes(1000),
            (wire.MAX_FRAME_BYTES + 1).to_bytes(4, "big"),
            random.randbytes(random.randint(1, 500)),
            _framed(random.randbytes(random.randint(1, 500))),
            _framed(random.choice([b"\xdf", b"\xdd", b"\xdb", b"\xc6"]) + b"\xff" * 4),
            _framed(deep),
            _framed(wrong),
            bytes(flipped),
            bytes(good[: random.randrange(len(good))]),
        ]
    )


def _framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


class Attacker:
    """Opens connections to a broker and misuses them.

    Args:
        path: the broker's socket.
        folder: folder for the ledgers of its studies.
        seed: seed of all its random choices.
    """

    def __init__(self, path: Path, folder: Path, seed: int) -> None:
        self._path = path
        self._folder = folder
        self._random = Random(seed)
        self._open: list[socket.socket] = []
        self.did: Counter[str] = Counter()

    def attack(self) -> None:
        """Carry out one random attack."""
        attacks: list[Callable[[], None]] = [
            self._talk_rubbish,
            self._talk_out_of_place,
            self._say_nothing,
            self._stop_in_the_middle,
            self._hurry_away,
        ]
        if self._random.random() < 0.02:
            attacks = [self._never_read]
        with contextlib.suppress(OSError):
            self._random.choice(attacks)()
        while len(self._open) > _MANY:
            self._open.pop(0).close()

    def _connect(self, *, hello: bool = True) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(_PATIENCE_SECONDS)
        self._open.append(sock)
        sock.connect(str(self._path))
        self.did["connections"] += 1
        if hello:
            roles = ["driver", "worker", "plain", "viewer", "king"]
            role = self._random.choice(roles)
            self._send(sock, wire.frame(wire.Hello(version=wire.VERSION, role=role)))
        return sock

    def _send(self, sock: socket.socket, data: bytes) -> None:
        sock.sendall(data)
        self.did["frames"] += 1
        self.did["bytes"] += len(data)

    def _talk_rubbish(self) -> None:
        """Send a broken frame, and count if the broker closes the connection."""
        sock = self._connect(hello=self._random.random() < 0.7)
        self._send(sock, broken_frame(self._random, self._folder))
        with contextlib.suppress(TimeoutError):
            while sock.recv(1 << 16):
                pass
            self.did["closed"] += 1

    def _talk_out_of_place(self) -> None:
        """Send many well-formed messages out of place."""
        sock = self._connect()
        for _ in range(self._random.randint(1, 20)):
            self._send(sock, wire.frame(any_message(self._random, self._folder)))

    def _say_nothing(self) -> None:
        self._connect(hello=False)

    def _stop_in_the_middle(self) -> None:
        """Send part of a frame, and nothing more."""
        sock = self._connect(hello=self._random.random() < 0.5)
        good = wire.frame(any_message(self._random, self._folder))
        self._send(sock, good[: self._random.randrange(1, len(good))])

    def _hurry_away(self) -> None:
        """Close the connection before the answer."""
        sock = self._connect()
        self._send(sock, wire.frame(any_message(self._random, self._folder)))
        sock.close()

    def _never_read(self) -> None:
        """Send requests without reading answers, until the broker closes the connection."""
        sock = self._connect()
        question = wire.frame(wire.GetStatus()) * 1000
        end = time.monotonic() + 2.0
        try:
            while time.monotonic() < end:
                with contextlib.suppress(TimeoutError):
                    sock.send(question)
                    self.did["frames"] += 1000
        except (BrokenPipeError, ConnectionResetError):
            self.did["closed"] += 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options: Any = parser.parse_args()
    attacker = Attacker(options.socket, options.folder, options.seed)
    end = time.monotonic() + options.seconds
    parent, said = os.getppid(), time.monotonic()
    while (now := time.monotonic()) < end and os.getppid() == parent:
        attacker.attack()
        if now - said >= 1.0:
            said = now
            print(json.dumps(attacker.did), flush=True)
            attacker.did.clear()
    print(json.dumps(attacker.did), flush=True)


if __name__ == "__main__":
    main()
