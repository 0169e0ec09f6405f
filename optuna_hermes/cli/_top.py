"""``top``: devices and trials, live, in a terminal."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from optuna_hermes.cli._studies import facts_and_ledger, storage_of
from optuna_hermes.errors import InvalidInputError


def top(
    storage: Annotated[
        str | None,
        typer.Option(
            envvar="OPTUNA_STORAGE", metavar="URL", help="For stories, `finish`, and what is over."
        ),
    ] = None,
    study_name: Annotated[
        str | None, typer.Option(metavar="NAME", help="The study to show.")
    ] = None,
) -> None:
    """Watch devices and trials, and overrule the policy.

    Without options it shows what this host's broker serves. A study that you name is shown also
    when no broker of yours serves it: read-only, out of its ledger. Leaving disturbs nothing. The
    same in one shot: `status`.

    \b
    Example:
      optuna-hermes top
      optuna-hermes top --storage sqlite:///study.db --study-name digits
    """
    try:
        from optuna_hermes.view._top._app import Top
    except ImportError as error:
        raise InvalidInputError(
            "`top` needs Textual, which is not installed: run `pip install 'optuna-hermes[top]'`."
        ) from error
    from optuna_hermes.cli._top_source import StudySource

    if study_name is not None:
        with facts_and_ledger(storage_of(storage, study_name), study_name):
            pass  # so that errors are printed before the screen is taken
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise InvalidInputError(
            "`top` needs a terminal: for a file or a pipe there is `optuna-hermes status`."
        )
    Top(StudySource(storage, study_name)).run()
