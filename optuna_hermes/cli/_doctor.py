"""``doctor``: is this host fit to run studies?"""

from __future__ import annotations

import typer

from optuna_hermes.cli._output import FAILED, show, show_json
from optuna_hermes.cli._studies import Json


def doctor(json: Json = False) -> None:
    """Check versions, devices, folders, broker and disk.

    Each check is ok, warn or fail, with a hint. The exit status is 1 if one fails.

    \b
    Example:
      optuna-hermes doctor
    """
    from optuna_hermes.cli._checks import check_all

    checks = check_all()
    failed = any(check.state == "fail" for check in checks)
    if json:
        document = [
            {"name": c.name, "state": c.state, "found": c.found, "hint": c.hint} for c in checks
        ]
        show_json({"ok": not failed, "checks": document})
    else:
        from optuna_hermes.view import checks_view

        show(checks_view([(c.state, c.name, c.found, c.hint) for c in checks]))
    if failed:
        raise typer.Exit(FAILED)
