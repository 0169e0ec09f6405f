"""What is done to a study while it does not run: closing suspended trials, clearing files away."""

from __future__ import annotations

import dataclasses
import math
import re
import stat
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optuna_hermes import _optuna as private
from optuna_hermes.ledger import EventRecord, Ledger

LOG_NAME = "output.log"
"""What a trial printed: kept, since it is no checkpoint."""

ORPHAN_SECONDS = 3600.0
"""From this age on a file that the ledger does not name belongs to nobody."""

_CLOSE = "close it with `optuna-hermes tell --trial-number NUMBER --state fail`"

_TRIAL_FOLDER = re.compile(r"trial-(\d+)")


def held_trials(status: Mapping[str, Any] | None, study: private.Study) -> frozenset[int]:
    """The unfinished trials of a study that a live process answers for.

    Args:
        status: what this host's broker tells, None if there is no broker.
        study: the study.
    """
    entries = [] if status is None else status["studies"]
    key = private.known_key(study)
    entry = next((each for each in entries if each["key"] == key), None)
    if entry is None:
        return frozenset()
    if entry["driver_pid"] is not None:  # it may carry on with any of them at any moment
        trials = study.get_trials(deepcopy=False)
        return frozenset(t.number for t in trials if not t.state.is_finished())
    return frozenset(r["trial"] for r in entry["runs"] if r["state"] in ("running", "parked"))


# -- finish ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Finish:
    """What can be done with suspended trials.

    Args:
        values: each trial that can be told COMPLETE, with its last reported value.
        refused: each one that cannot, with the reason.
    """

    values: Mapping[int, float]
    refused: Mapping[int, str]


def plan_finish(
    study: private.Study, numbers: Sequence[int] | None, held: Collection[int]
) -> Finish:
    """Decide which suspended trials can be told COMPLETE; changes nothing.

    Args:
        study: the study.
        numbers: the trials to finish, None for every suspended one.
        held: trials that a live process answers for.
    """
    trials = {trial.number: trial for trial in study.get_trials(deepcopy=False)}
    if numbers is None:
        numbers = [number for number, trial in trials.items() if private.ours(trial)]
    values, refused = {}, {}
    for number in numbers:
        reason = _refusal(trials.get(number), held)
        if reason is None:
            reported = trials[number].intermediate_values
            values[number] = reported[max(reported)]
        else:
            refused[number] = reason
    return Finish(values=values, refused=refused)


def _refusal(trial: Any, held: Collection[int]) -> str | None:
    if trial is None:
        return "no such trial"
    if not private.ours(trial):
        return f"not suspended but {trial.state.name}"
    if trial.number in held:
        return "held by a live process: stop its `optimize` first"
    reported = trial.intermediate_values
    if not reported:
        return f"nothing was reported: {_CLOSE}"
    if math.isnan(reported[max(reported)]):
        return f"the last value is nan: {_CLOSE}"
    return None


def finish(study: private.Study, ledger: Ledger, values: Mapping[int, float]) -> None:
    """Tell trials COMPLETE at these values, in Optuna and in the ledger.

    Args:
        study: the study.
        ledger: its ledger.
        values: as ``plan_finish`` found them.

    Raises:
        StorageError: one was finished by someone else meanwhile; those before it are done.
    """
    key = private.study_key(study)
    runs = {run.number: run for run in ledger.load_runs(key)}
    trials = {trial.number: trial for trial in study.get_trials(deepcopy=False)}
    for number, value in values.items():
        private.complete_trial(study, trials[number], value)
        now = time.time()
        if number in runs:
            done = dataclasses.replace(runs[number], state="done", tier=None, updated=now)
            ledger.save_run(done)
        detail = {"value": value}
        ledger.add_event(
            EventRecord(study=key, number=number, kind="finished", at=now, detail=detail)
        )


# -- gc ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Litter:
    """What nobody needs any more.

    Args:
        files: each with its size in bytes.
        rows: paths in the ledger to be forgotten.
    """

    files: Mapping[Path, int]
    rows: tuple[str, ...]

    @property
    def size_bytes(self) -> int:
        """What removing the files frees."""
        return sum(self.files.values())


def find_litter(
    study: private.Study,
    ledger: Ledger,
    folders: Collection[Path],
    held: Collection[int],
    now: float,
) -> Litter:
    """Find the checkpoints of finished trials, and files that the ledger does not name.

    Args:
        study: the study.
        ledger: its ledger.
        folders: folders that are this study's alone, with a folder for each trial.
        held: trials that a live process answers for: theirs stay.
        now: seconds since 1970. A trial may just be writing, on this host or on another, what the
            ledger does not name yet: such a file must be an hour old unless its trial is finished.
    """
    found = [file for folder in folders for file in _files(folder)]
    # Only now: a folder of a trial is made after the trial, so each one found has its trial here.
    trials = study.get_trials(deepcopy=False)
    over = {trial.number for trial in trials if trial.state.is_finished()}
    rows = ledger.load_checkpoints(private.study_key(study))
    stale = [row for row in rows if row.number in over]
    needed = {Path(row.path) for row in rows if row.number not in over}
    named = [_File.read(Path(row.path)) for row in stale]
    litter = [file for file in named if file is not None and file.number in over]
    litter += [
        file
        for file in found
        if file.path not in needed
        and file.number not in held
        and (file.number in over or now - file.changed > ORPHAN_SECONDS)
    ]
    return Litter(
        files={file.path: file.size_bytes for file in litter},
        rows=tuple(row.path for row in stale),
    )


def remove(study: private.Study, ledger: Ledger, litter: Litter) -> None:
    """Remove files, then their rows, then folders that are empty.

    Args:
        study: the study.
        ledger: its ledger.
        litter: as ``find_litter`` found it.
    """
    for path in litter.files:
        path.unlink(missing_ok=True)
    key = private.study_key(study)
    for row in litter.rows:
        ledger.drop_checkpoint(key, row)
    for folder in {path.parent for path in litter.files}:
        if not any(folder.iterdir()):
            folder.rmdir()


@dataclass(frozen=True, kw_only=True)
class _File:
    """A file in the folder of a trial; the log of what the trial printed is not one of them."""

    path: Path
    number: int
    size_bytes: int
    changed: float

    @classmethod
    def read(cls, path: Path) -> _File | None:
        match = _TRIAL_FOLDER.fullmatch(path.parent.name)
        if match is None or path.name == LOG_NAME or path.parent.is_symlink():
            return None
        try:
            status = path.lstat()
        except OSError:  # it is gone
            return None
        if not stat.S_ISREG(status.st_mode):
            return None
        return cls(
            path=path,
            number=int(match[1]),
            size_bytes=status.st_size,
            changed=status.st_mtime,
        )


def _files(folder: Path) -> Iterator[_File]:
    for path in sorted(folder.glob("trial-*/*")):
        file = _File.read(path)
        if file is not None:
            yield file
