"""Overrides of single trials: sent to the broker that serves them, else written to the ledger."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Literal

from optuna_hermes import _optuna
from optuna_hermes.broker import Connection, connect_if_any
from optuna_hermes.broker._imports import absolute_policy_name, import_folders
from optuna_hermes.broker._power_commands import powers_nothing
from optuna_hermes.broker._protocol import ChangePolicy, Finish, Finished, SetOverrides, Welcome
from optuna_hermes.errors import InvalidInputError, StorageError
from optuna_hermes.ledger import EventRecord, Ledger, live_hosts
from optuna_hermes.model import LIVE_STATES, MOST_COUNT, Override
from optuna_hermes.upkeep._finish import complete, plan_finish, served

# A trial that is to be finished first leaves its device, with a checkpoint at the end of its unit.
STOP_SECONDS = 60.0
_POLL_SECONDS, _MOST_POLL_SECONDS = 0.05, 1.0
"""Time between two questions about trials that have to stop, for each of them, and at most."""


def want(
    study: _optuna.Study, ledger: Ledger, overrides: SetOverrides
) -> Literal["applied", "soon", "later"]:
    """Hold, boost or release trials.

    Returns:
        ``applied`` if a broker of this user serves the study here. Otherwise it is in the ledger:
        ``soon`` if brokers of other hosts look there, which may serve the study, else ``later``,
        for the next one that does.

    Raises:
        InvalidInputError: one of the trials does not exist, or has ended; nothing is changed.
    """
    most = max(overrides.numbers)
    if most > MOST_COUNT:  # which no message to a broker can hold
        raise InvalidInputError(
            f"A trial's number is at most {MOST_COUNT} but got {most}: see `optuna-hermes status`."
        )
    if _said(study, overrides):
        return "applied"
    _write(study, ledger, overrides.numbers, overrides.override)
    # Once more: a broker may have read the ledger just before.
    if _said(study, overrides):
        return "applied"
    return "soon" if ledger.shared and live_hosts(ledger) else "later"


def change_policy(study: _optuna.Study, policy: str) -> str:
    """Change the policy of a study that runs.

    Returns:
        What the user should know of it, empty for nothing.

    Raises:
        InvalidInputError: no broker of this user serves the study.
        UnknownPolicyError: there is no such policy.
    """
    # A broker may have been started elsewhere: it finds a module of the user's by these folders.
    imports = import_folders() if ":" in policy else ()
    name = absolute_policy_name(policy)
    message = ChangePolicy(study=_optuna.study_key(study), policy=name, folders=imports)
    broker = _said(study, message)
    if broker is None:
        raise InvalidInputError(
            "Only a study that runs has a policy to change but no broker of yours serves this "
            f"one: say --policy {policy} to `optuna-hermes optimize`."
        )
    return powers_nothing(policy, broker.power)


def finish_live(
    study: _optuna.Study, ledger: Ledger, numbers: Sequence[int], folders: Collection[Path] = ()
) -> tuple[dict[int, float], dict[int, str]]:
    """Finish trials, each of which has reported, that a broker of this user serves.

    One that cannot be finished after all has the override again that it had before.
    ``folders`` are those of ``plan_finish``.

    Returns:
        The values of those that were finished, and the reasons why others were not.

    Raises:
        InvalidInputError: the broker refuses one at once, or serves the study no more; nothing is
            changed.
    """
    key = _optuna.study_key(study)
    with _broker_of(study) as broker:
        if broker is None:
            raise InvalidInputError(
                f"No broker of yours serves {study.study_name!r} any more: say `finish` again."
            )
        before = ledger.load_overrides(key)
        broker.want(Finish(study=key, numbers=tuple(numbers)))
        refused = _refused_to_stop(broker, key, numbers)
        try:
            # None is held: no process has one of them, and the broker gives them to no other.
            plan = plan_finish(study, ledger, numbers, (), folders)
            trials = {trial.number: trial for trial in study.get_trials(deepcopy=False)}
        except Exception:  # their database is away: all are as they were
            for number in numbers:
                _take_back(key, broker, number, before.get(number))
            raise
        refused.update(plan.refused)
        for number in numbers:
            if number not in refused:
                try:
                    complete(study, trials[number], plan)
                except StorageError as error:
                    refused[number] = str(error)
            if _optuna.end_of(study, _optuna.trial_id(trials[number])) is None:
                _take_back(key, broker, number, before.get(number))
                continue
            with contextlib.suppress(InvalidInputError):  # it knows the end already
                broker.want(Finished(study=key, numbers=(number,)))
    return {n: plan.values[n] for n in numbers if n not in refused}, refused


def _refused_to_stop(broker: Connection, key: str, numbers: Sequence[int]) -> dict[int, str]:
    """Wait until trials have left their processes; the reasons of those that have not."""
    refused, waiting = dict[int, str](), list(numbers)
    deadline = time.monotonic() + STOP_SECONDS
    # It is answered at once with whether a trial has still to stop: sent until it has.
    while waiting and time.monotonic() < deadline:
        # Longer for many: the broker has reports to answer meanwhile.
        time.sleep(min(_POLL_SECONDS * len(waiting), _MOST_POLL_SECONDS))
        for number in tuple(waiting):
            try:
                stops = broker.want(Finish(study=key, numbers=(number,)))
            except InvalidInputError as error:  # one that has ended by itself, for instance
                refused[number], stops = str(error), False
            if not stops:
                waiting.remove(number)
    reason = f"it has not stopped for {STOP_SECONDS:.0f} s, so say `finish` again"
    return {**refused, **dict.fromkeys(waiting, reason)}


def _take_back(key: str, broker: Connection, number: int, before: Override | None) -> None:
    override = None if before == "finishing" else before
    with contextlib.suppress(InvalidInputError):  # it has ended meanwhile
        broker.want(SetOverrides(study=key, numbers=(number,), override=override))


def _said(study: _optuna.Study, message: SetOverrides | ChangePolicy) -> Welcome | None:
    """The broker that was told, None if none of this user serves the study."""
    with _broker_of(study) as broker:
        if broker is None:
            return None
        broker.want(message)
        return broker.welcome


@contextlib.contextmanager
def _broker_of(study: _optuna.Study) -> Iterator[Connection | None]:
    """A connection to this user's broker, if it serves the study."""
    # One that does not answer may serve the study: that is an error, and no case of "no broker".
    connection = connect_if_any("viewer")
    if connection is None:
        yield None
        return
    with contextlib.closing(connection):
        yield connection if served(connection.ask_status(trials=False), study) else None


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
