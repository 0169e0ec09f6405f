"""``plot``: plots of a study, in a file or in optuna-dashboard."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from optuna_hermes.cli._output import note
from optuna_hermes.cli._studies import Storage, StudyName, study_and_ledger
from optuna_hermes.errors import InvalidInputError

DEFAULT_AGAINST = "fifo,round-robin"


def plot(
    storage: Storage,
    study_name: StudyName,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write them here: .html, .png, .svg or .pdf."),
    ] = None,
    dashboard: Annotated[
        bool, typer.Option("--dashboard", help="Show them in optuna-dashboard.")
    ] = False,
    against: Annotated[
        str, typer.Option(metavar="NAMES", help="Policies to replay the study under, with commas.")
    ] = DEFAULT_AGAINST,
) -> None:
    """Plot devices, curves and the best value over time.

    The best value so far stands beside what other policies would have made of the same trials.
    With --dashboard the plots are kept with the study, and optuna-dashboard shows them on its page.

    \b
    Example:
      optuna-hermes plot --storage sqlite:///study.db --study-name digits --out plots.html
      optuna-hermes plot --storage sqlite:///study.db --study-name digits --dashboard
    """
    from optuna_hermes.visualization import save_to_dashboard
    from optuna_hermes.visualization._page import check_path, save_page

    if out is None and not dashboard:
        raise InvalidInputError("Name a file, or the dashboard: --out plots.html or --dashboard.")
    if out is not None:
        check_path(out)
    names = [name for name in against.split(",") if name]
    with study_and_ledger(storage, study_name) as (study, _):
        if out is not None:
            save_page(study, out, names)
            note(f"Wrote {out}.")
        if dashboard:
            save_to_dashboard(study, names)
            note(f"The plots are on the page of study {study_name!r} in optuna-dashboard.")
