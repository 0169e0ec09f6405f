"""Output for people: progress, status, summary, charts; imports neither Optuna nor torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optuna_hermes.view._chart import BEST_MARK, chart
    from optuna_hermes.view._history import (
        Bar,
        Best,
        Point,
        StudyHistory,
        TrialHistory,
        best_so_far,
        holds,
        read_history,
        serves,
        state_of,
    )
    from optuna_hermes.view._jobs import jobs_view
    from optuna_hermes.view._notebook import shown
    from optuna_hermes.view._progress import ProgressDisplay, make_progress
    from optuna_hermes.view._simulation import counting, loop_view, simulation_view
    from optuna_hermes.view._status import status_view
    from optuna_hermes.view._summary import summary_view, suspensions
    from optuna_hermes.view._trial import say, trial_view
    from optuna_hermes.view._words import duration, parameters, plural, printable, ranges, size

__all__ = [
    "BEST_MARK",
    "Bar",
    "Best",
    "Point",
    "ProgressDisplay",
    "StudyHistory",
    "TrialHistory",
    "best_so_far",
    "chart",
    "counting",
    "duration",
    "holds",
    "jobs_view",
    "loop_view",
    "make_progress",
    "parameters",
    "plural",
    "printable",
    "ranges",
    "read_history",
    "say",
    "serves",
    "shown",
    "simulation_view",
    "size",
    "state_of",
    "status_view",
    "summary_view",
    "suspensions",
    "trial_view",
]

_NAMES = {
    "_chart": ("BEST_MARK", "chart"),
    "_history": (
        *("Bar", "Best", "Point", "StudyHistory", "TrialHistory"),
        *("best_so_far", "holds", "read_history", "serves", "state_of"),
    ),
    "_jobs": ("jobs_view",),
    "_notebook": ("shown",),
    "_progress": ("ProgressDisplay", "make_progress"),
    "_simulation": ("counting", "loop_view", "simulation_view"),
    "_status": ("status_view",),
    "_summary": ("summary_view", "suspensions"),
    "_trial": ("say", "trial_view"),
    "_words": ("duration", "parameters", "plural", "printable", "ranges", "size"),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    # Most processes show one thing of these, or none.
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
