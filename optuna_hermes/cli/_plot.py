"""``plot``: plots of a study, in a file or in optuna-dashboard."""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optuna_hermes.cli._output import note
from optuna_hermes.cli._studies import Storage, StudyName, study_and_ledger
from optuna_hermes.errors import InvalidInputError

if TYPE_CHECKING:
    from optuna_hermes._optuna import Study

DEFAULT_AGAINST = "fifo"
PICTURES = (".png", ".svg", ".pdf")


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

    if out is None and not dashboard:
        raise InvalidInputError("Name a file, or the dashboard: --out plots.html or --dashboard.")
    if out is not None and out.suffix not in (".html", *PICTURES):
        raise InvalidInputError(
            f"A file of plots must end in .html, {', '.join(PICTURES)} but got {str(out)!r}."
        )
    # Unlike a Path's, False without permission, too.
    if out is not None and not os.path.isdir(out.absolute().parent):
        raise InvalidInputError(f"No folder {str(out.parent)!r}: make it, or choose another.")
    names = [name for name in against.split(",") if name]
    with study_and_ledger(storage, study_name) as (study, _):
        if out is not None:
            _save(study, out, names)
            note(f"Wrote {out}.")
        if dashboard:
            save_to_dashboard(study, names)
            note(f"The plots are on the page of study {study_name!r} in optuna-dashboard.")


def _save(study: Study, path: Path, against: Sequence[str]) -> None:
    """Write the three plots into a page that needs no network, or into a picture."""
    from optuna_hermes.visualization.matplotlib import figure_of_all

    plots = _page(study, against) if path.suffix == ".html" else figure_of_all(study, against)
    try:
        if isinstance(plots, str):
            path.write_text(plots, "utf-8")
        else:
            plots.savefig(path, dpi=150)
    except OSError as error:
        raise InvalidInputError(f"{str(path)!r} cannot be written ({error.strerror}).") from error


def _page(study: Study, against: Sequence[str]) -> str:
    from optuna_hermes import visualization

    figures = [
        visualization.plot_best_over_device_time(study, against),
        visualization.plot_curves(study),
        visualization.plot_schedule(study),
    ]
    # plotly.js, which has megabytes, goes with the first figure only.
    parts = [
        figure.to_html(full_html=False, include_plotlyjs=index == 0, default_height="32em")
        for index, figure in enumerate(figures)
    ]
    body = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{html.escape(study.study_name)}</title></head>\n<body>\n{body}\n</body></html>\n"
    )
