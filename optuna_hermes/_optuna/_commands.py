"""Optuna's own command line."""

from __future__ import annotations

import logging
import sys
from functools import partial

import optuna

from optuna_hermes._optuna._storages import line, of_database, racing
from optuna_hermes.errors import InvalidInputError


def log_warnings_only() -> None:
    """Keep Optuna's own lines about every trial off the screen."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)


def optuna_verbs() -> frozenset[str]:
    """The verbs of Optuna's own command line, some of two words."""
    import optuna.cli

    return frozenset(optuna.cli._COMMANDS)


def run_optuna_cli(*samplers: type[optuna.samplers.BaseSampler]) -> int:
    """Run Optuna's own command line on ``sys.argv``.

    Args:
        samplers: more samplers that ``ask --sampler NAME`` shall know.

    Raises:
        InvalidInputError: what Optuna would show as a traceback.
    """
    import optuna.cli

    for sampler in samplers:
        setattr(optuna.samplers, sampler.__name__, sampler)
    optuna.cli._get_storage = partial(racing, optuna.cli._get_storage)
    for handler in logging.getLogger("optuna").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(sys.stderr)  # it has kept what that was when Optuna was imported
    try:
        return int(optuna.cli.main() or 0)
    except KeyError as error:
        raise InvalidInputError(str(error.args[0]) if error.args else repr(error)) from error
    except (ImportError, ValueError, OSError) as error:
        raise InvalidInputError(line(error)) from error
    except Exception as error:
        if not of_database(error):
            raise
        raise InvalidInputError(line(error)) from error
