"""Optuna's own verbs, extended by ``HermesSampler``."""

from __future__ import annotations

import contextlib
import difflib
import os
import sys
from collections.abc import Collection, Sequence
from itertools import pairwise

from optuna_hermes.cli._output import Printable, note
from optuna_hermes.errors import InvalidInputError

# Listed so that other command lines need not import Optuna; a test holds them against it.
KNOWN = frozenset(
    {
        *("ask", "best-trial", "best-trials", "create-study", "delete-study", "storage upgrade"),
        *("studies", "study set-user-attr", "study-names", "tell", "trials"),
    }
)


def is_for_optuna(argv: Sequence[str], ours: Collection[str]) -> bool:
    """True if the arguments are for Optuna's command line.

    Raises:
        InvalidInputError: the verb is neither ours nor Optuna's.
    """
    if not argv or argv[0] in ours:
        return False
    # Options may stand before Optuna's verbs.
    if argv[0].startswith("-"):
        return not KNOWN.isdisjoint([*argv, *map(" ".join, pairwise(argv))])
    if {argv[0], " ".join(argv[:2])} & KNOWN:
        return True
    from optuna_hermes import _optuna

    if {argv[0], " ".join(argv[:2])} & _optuna.optuna_verbs():
        return True
    near = difflib.get_close_matches(argv[0].lower(), [*ours, *sorted(KNOWN)], n=1)
    hint = f"did you mean {near[0]!r}? See" if near else "see"
    raise InvalidInputError(f"No verb {argv[0]!r}: {hint} `optuna-hermes --help`.")


def run(argv: Sequence[str]) -> int:
    """Run Optuna's command line.

    Raises:
        InvalidInputError: an error that Optuna would show as a traceback.
        UnprintedError: standard output cannot be written to.
    """
    from optuna_hermes import HermesSampler, _optuna

    sys.argv = ["optuna-hermes", *argv]
    # Printable would escape the colour codes of Optuna's log.
    os.environ.setdefault("NO_COLOR", "1")
    with (
        contextlib.redirect_stdout(Printable(sys.stdout)),
        contextlib.redirect_stderr(Printable(sys.stderr)),
    ):
        status = _optuna.run_optuna_cli(HermesSampler, note=note)
        sys.stdout.flush()  # at the end of the process it would be too late for an error
        return status
