"""The three plots in one file."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from optuna_hermes.errors import InvalidInputError
from optuna_hermes.visualization import _plotly as by_plotly
from optuna_hermes.visualization import matplotlib as by_matplotlib

if TYPE_CHECKING:
    import optuna

PICTURES = (".png", ".svg", ".pdf")


def check_path(path: Path) -> None:
    """Refuse a file that ``save_page`` could not write.

    Raises:
        InvalidInputError: its name has another ending, or its folder does not exist.
    """
    if path.suffix not in (".html", *PICTURES):
        raise InvalidInputError(
            f"A file of plots must end in .html, {', '.join(PICTURES)} but got {str(path)!r}."
        )
    if not path.absolute().parent.is_dir():
        raise InvalidInputError(f"No folder {str(path.parent)!r}: make it, or choose another.")


def save_page(study: optuna.Study, path: Path, against: Sequence[str]) -> None:
    """Write the three plots into a page that needs no network, or into a picture.

    Args:
        study: a study that was run with this package.
        path: see ``check_path``; its ending selects page or picture.
        against: see ``plot_best_over_device_time``.

    Raises:
        InvalidInputError: the file cannot be written, plotly or matplotlib is not installed, or
            there is no such policy.
    """
    check_path(path)
    is_page = path.suffix == ".html"
    plots = _page(study, against) if is_page else by_matplotlib.figure_of_all(study, against)
    try:
        if isinstance(plots, str):
            path.write_text(plots, "utf-8")
        else:
            plots.savefig(path, dpi=150)
    except OSError as error:
        raise InvalidInputError(f"{str(path)!r} cannot be written ({error.strerror}).") from error


def _page(study: optuna.Study, against: Sequence[str]) -> str:
    figures = [
        by_plotly.plot_best_over_device_time(study, against),
        by_plotly.plot_curves(study),
        by_plotly.plot_schedule(study),
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
