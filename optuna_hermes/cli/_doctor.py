"""``doctor``: checks of this host's fitness to run studies."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optuna_hermes.cli._output import show, show_json
from optuna_hermes.cli._studies import Json, optional_storage, storage_of
from optuna_hermes.errors import ExitStatus, HermesError
from optuna_hermes.view.formats import printable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from optuna_hermes.cli._checks import Check

RunCheck = Callable[[], "Iterable[Check]"]

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


def doctor(
    storage: Annotated[
        str | None,
        optional_storage("Check this storage of Optuna too; nothing is written into it."),
    ] = None,
    study_name: Annotated[
        str | None, typer.Option(metavar="NAME", help="And this study, and its checkpoints.")
    ] = None,
    json: Json = False,
) -> None:
    """Check versions, devices, folders, broker, database and disk.

    SLURM, containers and file systems have traps of their own: they are looked for too. Each
    check is ok, warn or fail, with what to do. The exit status is 1 if one fails.

    \b
    Example:
      optuna-hermes doctor
      optuna-hermes doctor --storage sqlite:///study.db --study-name digits
    """
    if study_name is not None:
        storage_of(storage, study_name)
    looks = _looks(storage, study_name)
    checks = [check for name, look in looks for check in _guarded(name, look)]
    failed = any(check.state == "fail" for check in checks)
    if json:
        show_json({"ok": not failed, "checks": list(map(dataclasses.asdict, checks))})
    else:
        show(_table(checks))
    if failed:
        raise typer.Exit(ExitStatus.FAILED)


def _looks(storage: str | None, study_name: str | None) -> Iterator[tuple[str, RunCheck]]:
    """The checks by name; those of a storage and a study only where these are given."""
    from optuna_hermes.cli._checks import _host, _software, _storage

    yield "Python", _software.python
    yield "packages", _software.packages
    yield "optional packages", _software.optional_packages
    yield "NVIDIA driver", _host.nvidia_driver
    yield "devices", _host.devices
    yield "runtime folder", _host.runtime_folder
    yield "broker", _host.broker
    yield "SLURM", partial(_host.slurm, os.environ, time.time())
    yield "container", _host.container
    yield "working folder", lambda: _host.working_folder(Path.cwd(), _host.kind_of(Path.cwd()))
    if storage is None:
        yield "SQLite commit", lambda: [_storage.commit_time(Path.cwd(), "in this folder")]
    else:
        yield "storage", partial(_storage.storage, storage)
        if study_name is not None:
            yield f"study {study_name!r}", partial(_storage.study, storage, study_name)
    yield "limits", _host.limits
    yield "room", _host.room


def _guarded(name: str, look: RunCheck) -> list[Check]:
    # One broken check must not hide the others: it has failed.
    from optuna_hermes.cli._checks import Check

    try:
        return list(look())
    except HermesError as error:
        return [Check(name=name, state="fail", found=str(error))]
    except Exception as error:
        hint = "The check itself did not work: see the message."
        return [Check(name=name, state="fail", found=repr(error), hint=hint)]


def _table(checks: Sequence[Check]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for _ in range(3):
        table.add_column(overflow="fold")
    for check in checks:
        words = f"{check.found}. {check.hint}" if check.hint else check.found
        texts = (Text(printable(text)) for text in (check.name, words))
        table.add_row(Text(check.state, style=_COLOURS[check.state]), *texts)
    return table
