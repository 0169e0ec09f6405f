"""Checks of this host's broker, its folder and its socket."""

from __future__ import annotations

import stat
from collections.abc import Iterator

from optuna_hermes.cli._checks._base import Check, good, judged
from optuna_hermes.cli._studies import broker_status
from optuna_hermes.view import plural


def runtime_folder() -> Iterator[Check]:
    """Check the broker's private folder; an error is raised if others have access to it."""
    from optuna_hermes.broker._election import runtime_dir

    path = runtime_dir()
    status = path.stat()
    mode = stat.S_IMODE(status.st_mode)
    yield good("runtime folder", f"{path}, uid {status.st_uid}, mode {mode:04o}")


def broker() -> Iterator[Check]:
    """Check that the broker answers, and report the problems of its studies."""
    from optuna_hermes.broker import _election as election

    document = broker_status()
    if document is None:
        yield good("broker", "none runs; `optimize` starts one")
        return
    directory = election.runtime_dir()
    status = election.socket_path(directory).stat()
    found = f"{election.socket_path(directory)}, mode {stat.S_IMODE(status.st_mode):04o}"
    yield good("socket", found)
    studies = plural(len(document["studies"]), "study", "studies")
    problems = [entry["problem"] for entry in document["studies"] if entry["problem"]]
    found = f"{plural(len(document['devices']), 'device')}, {studies}"
    yield judged("broker", found, problem="; ".join(problems))
