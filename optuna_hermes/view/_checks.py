"""The report of ``doctor``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from optuna_hermes.view._words import printable

if TYPE_CHECKING:
    from rich.console import RenderableType

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


def checks_view(checks: Sequence[tuple[str, str, str, str]]) -> RenderableType:
    """A table with a line for each check.

    Args:
        checks: state (ok, warn or fail), name, finding, and a hint (empty for none).
    """
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for _ in range(3):
        table.add_column(overflow="fold")
    for state, *texts in checks:
        name, found, hint = map(printable, texts)
        words = found if not hint else f"{found}. {hint}"
        table.add_row(Text(state, style=_COLOURS[state]), Text(name), Text(words))
    return table
