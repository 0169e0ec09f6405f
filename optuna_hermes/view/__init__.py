"""Output for people: progress, status, summary, charts; imports neither Optuna nor torch."""

from __future__ import annotations

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
