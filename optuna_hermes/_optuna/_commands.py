"""Optuna's own command line, run with this package's samplers and errors."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TextIO

import optuna
from optuna.trial import FrozenTrial

from optuna_hermes._optuna._local_ledgers import delete_with_files
from optuna_hermes._optuna._storages import (
    PROXY,
    check_journal,
    line,
    no_such_study,
    of_database,
    open_storage,
    racing,
    storage_errors,
)
from optuna_hermes.errors import ExitStatus, InvalidInputError, StorageError, UnprintedError


def log_warnings_only() -> None:
    """Keep Optuna's own lines about every trial off the screen."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)


def optuna_verbs() -> frozenset[str]:
    """The verbs of Optuna's own command line, some of two words."""
    import optuna.cli

    return frozenset(optuna.cli._COMMANDS)


def run_optuna_cli(
    *samplers: type[optuna.samplers.BaseSampler], note: Callable[[str], None]
) -> int:
    """Run Optuna's own command line on ``sys.argv``.

    Args:
        samplers: more samplers for ``ask --sampler NAME``.
        note: called with a line about what stays of a study that is deleted.

    Raises:
        InvalidInputError: an error that Optuna would show as a traceback.
        UnprintedError: as the stream that is standard output raises it.
    """
    import optuna.cli

    # Optuna looks a sampler up by its name in this module.
    for sampler in samplers:
        setattr(optuna.samplers, sampler.__name__, sampler)
    optuna.cli._get_storage = partial(_storage, optuna.cli._get_storage, note)
    try:
        with _log_to(sys.stderr):
            # Optuna returns 1 for bad input only, as for `storage upgrade --storage foo`.
            return int(ExitStatus.BAD_INPUT if optuna.cli.main() else ExitStatus.DONE)
    except (InvalidInputError, UnprintedError):
        raise
    except KeyError as error:
        raise InvalidInputError(str(error.args[0]) if error.args else repr(error)) from error
    except (ImportError, ValueError, OSError) as error:
        raise InvalidInputError(line(error)) from error
    except Exception as error:
        # A plain RuntimeError: `best-trial` of a study that has several objectives.
        if type(error) is not RuntimeError and not of_database(error):
            raise
        raise InvalidInputError(line(error)) from error


def _storage(get: Callable[..., Any], note: Callable[[str], None], *place: str | None) -> Any:
    """The storage of one of Optuna's commands, which deletes a study with its files.

    It says what there is in place of a study that it has not.
    """
    url = os.environ.get("OPTUNA_STORAGE", "") if place[0] is None else place[0]
    if not url:
        raise InvalidInputError(
            "A storage must be named but neither --storage nor $OPTUNA_STORAGE names one: add "
            "--storage URL."
        )
    # Optuna's `main` would print a page of help if it could not guess what a URL stands for.
    with storage_errors(url):
        if os.path.isfile(url) or ("://" not in url and place[1] is None):
            check_journal(url)
        # The commands of a script may start at once on a new database. Optuna's own know no proxy.
        opened = racing(open_storage, url) if url.startswith(PROXY) else racing(get, *place)
    # With the cache that each command would add: that is asked for the best trial.
    storage: Any = optuna.storages.get_storage(opened)
    delete, look_up, best = (
        storage.delete_study,
        storage.get_study_id_from_name,
        storage.get_best_trial,
    )

    def delete_study(study_id: int) -> None:
        name = storage.get_study_name_from_id(study_id)
        study = optuna.load_study(study_name=name, storage=storage)

        def delete_it() -> None:
            delete(study_id)
            # Optuna ignores that a server refuses: a row of the study has come meanwhile.
            with contextlib.suppress(KeyError):
                storage.get_study_system_attrs(study_id)  # names are cached
                raise StorageError(
                    f"Study {name!r} was not deleted, as a process wrote to it at that moment: "
                    "stop what trains it, then run the same command again."
                )

        for left in delete_with_files(study, delete_it):
            note(f"Checkpoints stay in {left}: remove them when no process trains the study.")

    def get_study_id_from_name(name: str) -> int:
        try:
            return int(look_up(name))
        except KeyError:
            names = [study.study_name for study in storage.get_all_studies()]
            raise no_such_study(url, name, names) from None

    def get_best_trial(study_id: int) -> FrozenTrial:
        try:
            found: FrozenTrial = best(study_id)
        except ValueError as error:
            raise InvalidInputError(
                "The best trial must be complete but none is yet: see `optuna-hermes trials`."
            ) from error
        return found

    storage.delete_study = delete_study
    storage.get_study_id_from_name = get_study_id_from_name
    storage.get_best_trial = get_best_trial
    return storage


@contextlib.contextmanager
def _log_to(stream: TextIO) -> Iterator[None]:
    """Send Optuna's log to a stream; else it goes to the standard error of Optuna's import."""
    # Optuna's command line changes the root logger, too: it is restored.
    root = logging.getLogger()
    level, roots = root.level, root.handlers[:]
    handlers = [
        handler
        for handler in logging.getLogger("optuna").handlers
        if type(handler) is logging.StreamHandler  # Optuna's own, not a file that others added
    ]
    before = [handler.setStream(stream) for handler in handlers]
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = roots
        for handler, old in zip(handlers, before, strict=True):
            if old is not None:
                handler.setStream(old)
