"""``finish`` and ``gc``: finishing of trials, and garbage collection."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optuna_hermes._job_environment import host_name
from optuna_hermes.cli._output import note, show, show_json
from optuna_hermes.cli._studies import Json, Storage, StudyName, broker_status, study_and_ledger
from optuna_hermes.errors import BrokerConflictError, ExitStatus, InvalidInputError
from optuna_hermes.view.formats import plural, ranges, size

if TYPE_CHECKING:
    from optuna_hermes._optuna import Study
    from optuna_hermes.upkeep import Litter, Rows

CheckpointDir = Annotated[
    str | None, typer.Option(metavar="FOLDER", help="Or URL, as given to `optimize`, if it was.")
]


def finish(
    storage: Storage,
    study_name: StudyName,
    trials: Annotated[
        list[int] | None, typer.Argument(metavar="TRIAL", help="Numbers of trials.")
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Every suspended trial that has reported.")
    ] = False,
    checkpoint_dir: CheckpointDir = None,
    json: Json = False,
) -> int:
    """Close trials at their last reported value.

    They are told COMPLETE without training on; one that trains is suspended first. Refused for a
    trial that has reported nothing, and for one of another host, or of a program of your own, that
    holds it. With --all trials that a running `optimize` holds are left as they are. Values that
    the database has missed lie beside checkpoints: say where those are, as to `optimize`. Status 2
    if any that was named is not finished.

    \b
    Example:
      optuna-hermes finish --storage sqlite:///study.db --study-name digits 3 7
    """
    if every == bool(trials):
        raise InvalidInputError("Name the trials to finish, or say --all for every suspended one.")
    named = None if every else trials
    values, refused = close_trials(storage, study_name, named, checkpoint_dir)
    if json:
        show_json({"finished": values, "refused": refused})
    else:
        finished = f"Finished {plural(len(values), 'trial')}: {ranges(values)}."
        show(finished if values else "No trial was finished.")
        if refused:
            note(f"Left as they are: {_reasons(refused)}.")
    return ExitStatus.BAD_INPUT if refused and trials else 0


def close_trials(
    storage: str, name: str, trials: list[int] | None, checkpoint_dir: str | None = None
) -> tuple[dict[int, float], dict[int, str]]:
    """Finish trials at their last values; None for every suspended one that has reported.

    ``checkpoint_dir`` is searched too for values that Optuna could not be told.

    Returns:
        The values of those that were finished, and the reasons why others were not.

    Raises:
        InvalidInputError: a named trial cannot be finished, or none can, as is known before
            anything is changed; or none that trains could be finished after all.
        StorageError: as ``study_and_ledger``.
    """
    from optuna_hermes import upkeep

    held_by = broker_status()
    with study_and_ledger(storage, name) as (study, ledger):
        folders = _folders(study, checkpoint_dir)
        held = upkeep.held_trials(held_by, study, ledger, waiting=trials is None)
        mine = upkeep.served(held_by, study) is not None
        # A process of this user's broker is no reason: it is asked to stop if its trial is named.
        asked = held if trials and mine else frozenset()
        plan = upkeep.plan_finish(study, ledger, trials, held - asked, folders)
        if plan.refused and (trials or not plan.values):
            raise InvalidInputError(f"Nothing was finished: {_reasons(plan.refused)}.")
        live = [number for number in plan.values if number in asked]
        values, refused = upkeep.finish_live(study, ledger, live, folders) if live else ({}, {})
        free = {n: value for n, value in plan.values.items() if n not in asked}
        upkeep.finish(study, ledger, dataclasses.replace(plan, values=free))
    values, refused = {**free, **values}, {**plan.refused, **refused}
    if refused and not values:
        raise InvalidInputError(f"Nothing was finished: {_reasons(refused)}.")
    return values, refused


def _reasons(refused: Mapping[int, str]) -> str:
    by_reason: dict[str, list[int]] = {}
    for number, reason in refused.items():
        by_reason.setdefault(reason, []).append(number)
    return "; ".join(
        f"{'trial' if len(numbers) == 1 else 'trials'} {ranges(numbers)}: {reason}"
        for reason, numbers in by_reason.items()
    )


def gc(
    storage: Storage,
    study_name: StudyName,
    checkpoint_dir: CheckpointDir = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be removed.")
    ] = False,
    json: Json = False,
) -> None:
    """Remove checkpoints and rows that are not needed any more.

    Checkpoints of finished trials and those that the ledger does not know; leases without a
    holder, brokers that are gone, studies that were deleted, and events older than 30 days and than
    every unfinished trial. What a suspended or a running trial needs stays. So does what trials
    have printed, or saved in their folders themselves.

    \b
    Example:
      optuna-hermes gc --storage sqlite:///study.db --study-name digits --dry-run
    """
    try:
        litter, rows = _cleared_away(storage, study_name, checkpoint_dir, dry_run=dry_run)
    except OSError as error:
        # What the ledger names it still names: files go before their rows.
        raise InvalidInputError(
            f"{error.filename or study_name!r} cannot be cleared away ({error.strerror or error}): "
            "let this user do so, and run the same command again; no trial has lost anything."
        ) from error
    if json:
        files = {str(place): n_bytes for place, n_bytes in litter.files.items()}
        freed = {"dry_run": dry_run, "freed_bytes": litter.size_bytes, "files": files}
        show_json({**freed, "elsewhere": litter.elsewhere, **dataclasses.asdict(rows)})
        return
    files_text = f"{plural(len(litter.files), 'file')}, {size(litter.size_bytes)}"
    show(f"Would remove {files_text}." if dry_run else f"Removed {files_text}.")
    counts = (
        (len(rows.leases), "orphaned lease", None),
        (len(rows.hosts), "dead broker", None),
        (len(rows.studies), "deleted study", "deleted studies"),
        (rows.events, "old event", None),
    )
    cleared = ", ".join(plural(*count) for count in counts if count[0])
    if cleared:
        show(f"{'Would clear' if dry_run else 'Cleared'} from the ledger: {cleared}.")
    for folder in litter.elsewhere:
        note(f"The ledger names checkpoints in {folder!r} too{_way_to(folder)}.")


def _cleared_away(
    storage: str, study_name: str, checkpoint_dir: str | None, *, dry_run: bool
) -> tuple[Litter, Rows]:
    """Remove garbage, unless ``dry_run``, and return what it was."""
    from optuna_hermes import _optuna, upkeep
    from optuna_hermes.broker import _election as election
    from optuna_hermes.broker import _holders as holders
    from optuna_hermes.suspend._tiers import _remote

    held_by, now = broker_status(), time.time()
    remote = checkpoint_dir is not None and _remote.is_url(checkpoint_dir)
    if remote:
        _remote.check_url(str(checkpoint_dir))
    serving = [] if held_by is None else [served.key for served in held_by.studies]
    with study_and_ledger(storage, study_name) as (study, ledger):
        folders = _folders(study, checkpoint_dir)
        stores = [_optuna.checkpoint_url(study, str(checkpoint_dir))] if remote else []
        held = upkeep.held_trials(held_by, study, ledger)
        litter = upkeep.find_litter(study, ledger, folders, held, now, stores)
        # Processes of a dead broker may go on, and reconnect to the next one with their leases.
        lives_on = held_by is None and holders.living(election.runtime_dir())
        host = None if lives_on else host_name()
        rows = upkeep.find_rows(study, ledger, host=host, serving=serving, now=now)
        parents = [each.parent for each in folders]
        bases = [str(checkpoint_dir).rstrip("/")] if remote else []
        litter, gone = upkeep.with_deleted(litter, ledger, rows.studies, parents, bases)
        rows = dataclasses.replace(rows, studies=gone)
        if not dry_run:
            upkeep.remove(study, ledger, litter)
            upkeep.remove_rows(study, ledger, rows)
    return litter, rows


def _folders(study: Study, checkpoint_dir: str | None) -> list[Path]:
    """The folders of a study's checkpoints on this host."""
    from optuna_hermes import _optuna
    from optuna_hermes.broker._privacy import private_folder
    from optuna_hermes.suspend._tiers import _remote
    from optuna_hermes.workers._open_study import copies_folder

    folders, copies = [_optuna.checkpoint_root(study)], copies_folder()
    # What goes to a store is written to a folder first; another user's says nothing of the study.
    if copies.is_dir():
        with contextlib.suppress(BrokerConflictError):
            folders.append(_optuna.checkpoint_root(study, private_folder(copies, "")))
    if checkpoint_dir is not None and not _remote.is_url(checkpoint_dir):
        folders.append(_optuna.checkpoint_root(study, Path(checkpoint_dir).expanduser()))
    return folders


def _way_to(place: str) -> str:
    """The words that say how to search a place of checkpoints that was not searched."""
    from optuna_hermes.suspend._tiers import _remote

    if _remote.is_url(place) or Path(place).is_dir():
        return ": say --checkpoint-dir for those"
    # A disk that is not mounted looks as if it were gone: its user knows.
    return (
        ", which is no folder of this host: say `gc --checkpoint-dir` where it is, or make it, "
        "empty, if it is gone for good"
    )
