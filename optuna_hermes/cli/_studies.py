"""The options that name a study, and the opening of that study and its ledger."""

from __future__ import annotations

import contextlib
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optuna_hermes.cli._output import note
from optuna_hermes.errors import InvalidInputError, StorageError
from optuna_hermes.model import MOST_SEED

if TYPE_CHECKING:
    from optuna_hermes._optuna import Study
    from optuna_hermes._optuna_tables import StudyFacts
    from optuna_hermes.broker._protocol import BrokerStatus
    from optuna_hermes.ledger import Ledger

PROGRAM = "optuna-hermes"

START_SECONDS = 60.0
"""Seconds in which a database must answer when a study begins: its URL may be wrong."""

# More than any study has, and an integer of any database.
MOST_TRIALS = 10**9

SEED = typer.Option(min=0, max=MOST_SEED, metavar="N", help="Sampler and trials draw from it.")

Storage = Annotated[
    str,
    typer.Option(
        envvar="OPTUNA_STORAGE",
        metavar="URL",
        help="Optuna's storage: sqlite:///study.db, a journal's file, grpc://HOST:PORT.",
    ),
]
StudyName = Annotated[str, typer.Option(metavar="NAME", help="The study's name.")]
OptionalStudyName = Annotated[str | None, typer.Option(metavar="NAME", help="The study's name.")]


def finite(value: float | None) -> float | None:
    """Refuse an option's number that is infinite or NaN."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"it must be a finite number but is {value}")
    return value


Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def seconds(help: str, least: float = 0.0) -> Any:
    """An option of seconds."""
    return typer.Option(min=least, callback=finite, metavar="S", help=help)


def optional_storage(help: str) -> Any:
    """An option for a storage that a verb may do without."""
    return typer.Option(envvar="OPTUNA_STORAGE", metavar="URL", help=help)


@contextlib.contextmanager
def study_to_optimize(storage: str, name: str, *, make: bool = False) -> Iterator[Study]:
    """Load or create a study.

    It waits for ``START_SECONDS`` while the database does not answer.

    Raises:
        DatabaseOutageError: it did not answer for longer.
        StorageError: the storage cannot be used, is in memory, or holds other studies but not this
            one and ``make`` is False.
    """
    from optuna_hermes import HermesPruner, HermesSampler, _optuna
    from optuna_hermes._optuna_tables import is_there, sqlite_file

    _optuna.log_warnings_only()
    if (file := sqlite_file(storage)) is not None:
        is_there(file)  # or it says why its folder cannot be entered
    begun = time.monotonic()
    names = _optuna.with_retry(_optuna.study_names, storage, seconds=START_SECONDS, since=begun)
    # Among other studies a new name is rather a wrong one.
    if name not in names and names and not make:
        raise _optuna.no_such_study(storage, name, names)
    study, is_new = _optuna.with_retry(
        _optuna.create_study,
        storage,
        name,
        seconds=START_SECONDS,
        since=begun,
        sampler=HermesSampler(),
        pruner=HermesPruner(),
    )
    if not _optuna.shared(study):
        raise StorageError(
            "The processes of a study must reach its storage but "
            f"{_optuna.without_password(storage)} is in memory: give --storage sqlite:///study.db."
        )
    if is_new:
        note(f"Made study {name!r} in {_optuna.without_password(storage)}; it minimises.")
    with _optuna.database_errors(storage):
        yield study


@contextlib.contextmanager
def study_and_ledger(storage: str, name: str) -> Iterator[tuple[Study, Ledger]]:
    """An existing study, and its ledger.

    Raises:
        StorageError: the storage cannot be reached, has no such study, or no ledger of it.
    """
    from optuna_hermes import _optuna
    from optuna_hermes.ledger import open_ledger

    study = _study(storage, name)
    with _optuna.database_errors(storage):
        if _optuna.known_key(study) is None:
            raise no_ledger(name)
        with contextlib.closing(open_ledger(_optuna.ledger_url(study))) as ledger:
            yield study, ledger


@contextlib.contextmanager
def facts_and_ledger(storage: str, name: str) -> Iterator[tuple[StudyFacts, Ledger]]:
    """As ``study_and_ledger``, with facts in place of a study."""
    # Without the import of Optuna, which takes longer than all that `status` does.
    from optuna_hermes.ledger import open_ledger

    facts = facts_reader(storage, name)()
    if facts.ledger_url is None:
        raise no_ledger(name)
    with contextlib.closing(open_ledger(facts.ledger_url)) as ledger:
        yield facts, ledger


def facts_reader(storage: str, name: str) -> Callable[[], StudyFacts]:
    """A function that reads the facts of a study from Optuna's tables, again and again.

    What is in no database is loaded once, as of a journal: its storage then reads what is new.

    Raises:
        StorageError: by that function: the storage cannot be reached, or has no such study.
    """
    from optuna_hermes._optuna_tables import read_facts

    loaded: Study | None = None

    def read() -> StudyFacts:
        nonlocal loaded
        check_file(storage)
        facts = read_facts(storage, name) if loaded is None else None
        if facts is not None:
            return facts
        from optuna_hermes import _optuna

        if loaded is not None:
            # A key error: it was deleted, and may be there anew.
            with contextlib.suppress(KeyError), _optuna.storage_errors(storage):
                return _optuna.facts(loaded)
        # Of no database, or of no study: Optuna says which. Or a database did not answer just now.
        study = _study(storage, name)
        loaded = None if _optuna.shares_its_ledger(study) else study
        return _optuna.facts(study)

    return read


def source_of(context: typer.Context, parameter: str) -> str:
    """The name of the source of a value: COMMANDLINE, ENVIRONMENT or DEFAULT."""
    source = context.get_parameter_source(parameter)
    return "" if source is None else source.name


def note_storage_alone(context: typer.Context) -> None:
    """Say that a storage shows no study without its name, if the command line has named one."""
    if source_of(context, "storage") == "COMMANDLINE":
        note("--storage alone shows no study: add --study-name NAME.")


def storage_of(storage: str | None, study_name: str) -> str:
    """The storage of a named study, which must be given with the name."""
    if storage is None:
        raise InvalidInputError(
            f"--study-name needs --storage but got {study_name!r} alone: add --storage URL."
        )
    return storage


def check_file(storage: str) -> None:
    """Refuse a missing file of SQLite, which reading would create, and a database in memory."""
    from optuna_hermes._optuna_tables import is_there, sqlite_file

    scheme, _, place = storage.partition("://")
    if scheme.split("+")[0] == "sqlite" and place.partition("?")[0] in ("", "/", "/:memory:"):
        raise StorageError(
            f"A study must be in a file or on a server to be read by another process but {storage} "
            "is in memory: give --storage sqlite:///study.db."
        )
    file = sqlite_file(storage)
    if file is not None and not is_there(file):
        raise StorageError(f"No file {str(file)!r}: check the path in --storage {storage}.")


def _study(storage: str, name: str) -> Study:
    from optuna_hermes import _optuna

    _optuna.log_warnings_only()
    check_file(storage)
    return _optuna.load_study(storage, name)


def no_ledger(name: str) -> StorageError:
    """The error of a study without a ledger."""
    return StorageError(
        f"Study {name!r} has no ledger, for no trial of it was ever suspended: run it with "
        "`optuna-hermes optimize`, wait for its first trial if it runs, or see `optuna-hermes "
        "trials`."
    )


def broker_status(*, curves: bool = False) -> BrokerStatus | None:
    """The status of this host's broker, None if there is none."""
    from optuna_hermes.broker import broker_status

    return broker_status(curves=curves)


def same_command() -> str:
    """This process's command line, quoted for a shell, with passwords hidden."""
    from optuna_hermes import _optuna

    return shlex.join([PROGRAM, *map(_optuna.without_password, sys.argv[1:])])
