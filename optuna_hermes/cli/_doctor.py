"""``doctor``: checks of this host's fitness to run studies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from optuna_hermes.cli._output import FAILED, show, show_json
from optuna_hermes.cli._studies import Json, storage_of

if TYPE_CHECKING:
    from rich.console import RenderableType

    from optuna_hermes.cli._checks import Check

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


def doctor(
    storage: Annotated[
        str | None,
        typer.Option(
            envvar="OPTUNA_STORAGE",
            metavar="URL",
            help="Look at this storage of Optuna too; nothing is written into it.",
        ),
    ] = None,
    study_name: Annotated[
        str | None, typer.Option(metavar="NAME", help="And at this study, and its checkpoints.")
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
    from optuna_hermes.cli._checks import check_all

    if study_name is not None:
        storage_of(storage, study_name)
    checks = check_all(storage, study_name)
    failed = any(check.state == "fail" for check in checks)
    if json:
        document = [
            {"name": c.name, "state": c.state, "found": c.found, "hint": c.hint} for c in checks
        ]
        show_json({"ok": not failed, "checks": document})
    else:
        show(_table(checks))
    if failed:
        raise typer.Exit(FAILED)


def _table(checks: Sequence[Check]) -> RenderableType:
    """A table with a line for each check."""
    from rich.table import Table
    from rich.text import Text

    from optuna_hermes.view import printable

    table = Table.grid(padding=(0, 2))
    for _ in range(3):
        table.add_column(overflow="fold")
    for check in checks:
        name, found, hint = map(printable, (check.name, check.found, check.hint))
        words = found if not hint else f"{found}. {hint}"
        table.add_row(Text(check.state, style=_COLOURS[check.state]), Text(name), Text(words))
    return table
