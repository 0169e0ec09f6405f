"""Overrides of single trials: sent to the broker that serves them, else written to the ledger."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from optuna_hermes import _optuna
from optuna_hermes.broker import Connection, connect_if_any
from optuna_hermes.broker._imports import anywhere, folders
from optuna_hermes.broker._protocol import ChangePolicy, Finish, Finished, SetOverrides
from optuna_hermes.errors import BrokerError, InvalidInputError
from optuna_hermes.ledger import EventRecord, Ledger
from optuna_hermes.model import LIVE_STATES, MOST_COUNT, Override
from optuna_hermes.upkeep._finish import complete, plan_finish

# A trial that is to be finished first leaves its device, with a checkpoint at the end of its unit.
STOP_SECONDS = 60.0
_LOOK_SECONDS = 0.05


def want(study: _optuna.Study, ledger: Ledger, overrides: SetOverrides) -> bool:
    """Hold, boost or release trials.

    Returns:
        True if a broker of this user serves the study and has applied it. Otherwise it is in the
        ledger, for the next broker that serves the study.

    Raises:
        InvalidInputError: one of the trials does not exist, or has ended; nothing is changed.
    """
    most = max(overrides.numbers)
    if most > MOST_COUNT:  # which no message to a broker can hold
        raise InvalidInputError(
            f"A trial's number is at most {MOST_COUNT} but got {most}: see `optuna-hermes status`."
        )
    if _said(overrides):
        return True
    _write(study, ledger, overrides.numbers, overrides.override)
    # Once more: a broker may have read the ledger just before.
    return _said(overrides)


def change_policy(key: str, policy: str) -> None:
    """Change the policy of a study that runs.

    Raises:
        InvalidInputError: no broker of this user serves the study.
        UnknownPolicyError: there is no such policy.
    """
    # A broker may have been started elsewhere: it finds a module of the user's by these folders.
    imports = folders() if ":" in policy else ()
    if not _said(ChangePolicy(study=key, policy=anywhere(policy), folders=imports)):
        raise InvalidInputError(
            "Only a study that runs has a policy to change but no broker of yours serves this "
            f"one: say --policy {policy} to `optuna-hermes optimize`."
        )


def finish_live(
    study: _optuna.Study, ledger: Ledger, numbers: Sequence[int], folders: Collection[Path] = ()
) -> dict[int, float] | None:
    """Finish trials, each of which has reported, that a broker of this user serves.

    ``folders`` are those of ``plan_finish``.

    Returns:
        Their values; None if no broker of this user serves the study.

    Raises:
        InvalidInputError: one cannot be finished; nothing is changed.
        BrokerError: one does not stop.
    """
    key = _optuna.study_key(study)
    wanted = Finish(study=key, numbers=tuple(numbers))
    with _broker_of(key) as broker:
        if broker is None:
            return None
        deadline = time.monotonic() + STOP_SECONDS
        # It is answered at once with whether a trial has still to stop: sent until none has.
        while broker.want(wanted):
            if time.monotonic() > deadline:
                raise BrokerError(
                    f"A trial to be finished has not left its device for {STOP_SECONDS:.0f} s: "
                    "see `optuna-hermes status`, and say `finish` again."
                )
            time.sleep(_LOOK_SECONDS)
        return _complete(study, ledger, broker, numbers, folders)


def _complete(
    study: _optuna.Study,
    ledger: Ledger,
    broker: Connection,
    numbers: Sequence[int],
    folders: Collection[Path],
) -> dict[int, float]:
    """Finish suspended trials in Optuna, then at the broker."""
    key = _optuna.study_key(study)
    # None is held: no process has one of them any more, and the broker gives them to no other.
    plan = plan_finish(study, ledger, numbers, (), folders)
    trials = {trial.number: trial for trial in study.get_trials(deepcopy=False)}
    for number in numbers:
        if number in plan.values:
            complete(study, trials[number], plan)
        # One that has finished by itself only has to be reported to the broker.
        elif not trials[number].state.is_finished():
            raise InvalidInputError(f"Trial {number} is held: {plan.refused[number]}.")
        broker.want(Finished(study=key, numbers=(number,)))
    return dict(plan.values)


def _said(message: SetOverrides | ChangePolicy) -> bool:
    with _broker_of(message.study) as broker:
        if broker is None:
            return False
        broker.want(message)
        return True


@contextlib.contextmanager
def _broker_of(key: str) -> Iterator[Connection | None]:
    """A connection to this user's broker, if it serves the study."""
    # One that does not answer may serve the study: that is an error, and no case of "no broker".
    connection = connect_if_any("viewer")
    if connection is None:
        yield None
        return
    with contextlib.closing(connection):
        yield connection if connection.ask_status(trials=False).study(key) else None


def _write(
    study: _optuna.Study, ledger: Ledger, numbers: Sequence[int], override: Override | None
) -> None:
    key = _optuna.study_key(study)
    live = {record.number for record in ledger.load_trials(key) if record.state in LIVE_STATES}
    ended = {n for n, state in _optuna.trial_states(study).items() if state.is_finished()}
    gone = [number for number in numbers if number not in live - ended]
    if gone:
        raise InvalidInputError(
            f"Trial {gone[0]} of study {study.study_name!r} has ended, or never had a device: see "
            "`optuna-hermes status`."
        )
    before = ledger.load_overrides(key)
    # All or none: an interruption must not leave half of what was asked for.
    with ledger.batch():
        for number in dict.fromkeys(numbers):
            if before.get(number) == override:
                continue
            ledger.save_override(key, number, override)
            kind = f"no longer {before[number]}" if override is None else override
            event = EventRecord(study=key, number=number, kind=kind, at=time.time())
            ledger.add_event(event)
