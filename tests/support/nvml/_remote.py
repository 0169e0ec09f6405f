"""A source of devices in a process of its own, which loads the stand-in library.

As a script this file is that process: it reads requests, and answers them.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from optuna_hermes.broker._devices._source import Poll


class RemoteSource:
    """``NvmlDevices`` of another process.

    Args:
        uuids: of the devices.
        library: the folder of the stand-in library.
        variables: further environment variables of that process.
    """

    def __init__(
        self, uuids: Sequence[str], library: Path, variables: Mapping[str, str] | None = None
    ) -> None:
        folders = [str(Path(__file__).parents[2]), *sys.path]
        self._process = subprocess.Popen(
            [sys.executable, __file__, *uuids],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                **os.environ,
                **(variables or {}),
                "LD_LIBRARY_PATH": str(library),
                "PYTHONPATH": os.pathsep.join(folders),
            },
        )

    def poll(self, own_pids: Collection[int] = ()) -> Poll:
        """See ``DeviceSource``."""
        polled: Poll = self._ask(("poll", tuple(own_pids)))
        return polled

    def close(self) -> None:
        """Close the driver, and end the process."""
        self._ask(("close", ()))
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()

    def _ask(self, request: tuple[str, tuple[int, ...]]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump(request, self._process.stdin)
        self._process.stdin.flush()
        return pickle.load(self._process.stdout)


def serve(uuids: Sequence[str]) -> None:
    from optuna_hermes.broker._devices._nvml import NvmlDevices

    source = NvmlDevices(uuids, "here")
    answers = os.fdopen(os.dup(1), "wb")
    requests = os.fdopen(0, "rb")
    while requests.peek(1):
        name, own_pids = pickle.load(requests)
        answer = source.poll(own_pids) if name == "poll" else getattr(source, name)()
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    serve(sys.argv[1:])
