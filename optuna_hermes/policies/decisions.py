"""Decisions as policies return them: made plain, checked, and errors that name the policy."""

from __future__ import annotations

import json
import math
import operator
from collections import Counter
from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from traceback import walk_tb

from optuna_hermes.errors import InvalidInputError
from optuna_hermes.model import WAITING_STATES, Decision, Snapshot, TrialView

_LONGEST = 1000
"""Most characters of an error that are shown."""


def plain(decision: Decision) -> Decision:
    """The decision of tuples, Python's own numbers and JSON: nothing else can be sent or kept."""
    given = tuple(
        replace(
            each,
            trial=None if each.trial is None else operator.index(each.trial),
            devices=tuple(each.devices),
            slice_seconds=None if each.slice_seconds is None else float(each.slice_seconds),
        )
        for each in decision.assignments
    )
    return Decision(
        assignments=given,
        pruned=tuple(decision.pruned),
        powered_down=tuple(decision.powered_down),
        memory=json.loads(json.dumps(decision.memory)),  # raises for what the ledger could not keep
    )


def check(decision: Decision, snapshot: Snapshot) -> None:
    """Check that a decision keeps the contract of policies.

    Raises:
        ValueError: it does not.
    """
    given = decision.assignments
    trials = Counter(each.trial for each in given if each.trial is not None)
    devices = Counter(id_ for each in given for id_ in each.devices)
    waiting = _waiting(snapshot, trials.keys())
    free = {device.id for device in snapshot.devices if device.free}
    wrong = [
        *(f"trial {trial}" for trial, n in trials.items() if n > 1 or trial not in waiting),
        *(f"device {id_}" for id_, n in devices.items() if n > 1 or id_ not in free),
    ]
    if wrong:
        raise ValueError(
            "a policy assigns waiting trials and free devices, each once at most, but got "
            + ", ".join(wrong)
        )
    idle = {device.id for device in snapshot.devices if device.free or not device.powered}
    down = [id_ for id_ in decision.powered_down if id_ not in idle or id_ in devices]
    if down:
        raise ValueError(f"a policy powers down idle devices but got {', '.join(down)}")
    for each in given:
        seconds = each.slice_seconds
        if seconds is not None and not 0.0 <= seconds < math.inf:
            raise ValueError(f"a policy's slices last a finite number of seconds but got {seconds}")
        trial = None if each.trial is None else waiting[each.trial]
        _check_sizes(trial, len(each.devices), each.batch_size)


def _waiting(snapshot: Snapshot, numbers: Set[int]) -> dict[int, TrialView]:
    """Those of some trials that wait, by number."""
    found: dict[int, TrialView] = {}
    for trial in chain(snapshot.trials, snapshot.unstarted.listed):
        if len(found) == len(numbers):
            break  # of thousands, at each decision of a simulation
        if trial.number in numbers and trial.state in WAITING_STATES:
            found[trial.number] = trial
    return found


def _check_sizes(trial: TrialView | None, n_devices: int, batch_size: object) -> None:
    who = "a new trial" if trial is None else f"trial {trial.number}"
    least, most = (1, 1) if trial is None else trial.device_range
    if not least <= n_devices <= most:
        raise ValueError(
            "a policy assigns as many devices as a trial may have, one to a new trial, but got "
            f"{n_devices} for {who}"
        )
    elastic = None if trial is None else trial.elastic
    smallest, largest = (0, -1) if elastic is None else elastic.batch_sizes
    known = type(batch_size) is int and smallest <= batch_size <= largest
    if batch_size is not None and not known:
        raise ValueError(
            "a policy assigns batch sizes to elastic trials, ints within their limits, but got "
            f"{batch_size!r} for {who}"
        )


def said(error: BaseException) -> str:
    """The ``repr`` of an error of a user's own, whatever it holds; its class if it has none."""
    try:
        text = repr(error)
    except Exception:  # it is the user's class
        text = type(error).__name__
    # An assertion may hold all of a snapshot.
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def raised(error: BaseException) -> str:
    """Describe an error of a policy, with file and line unless it is one of the checks here."""
    text = said(error)
    frames = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    path, line = frames[-1]
    return text if path in (__file__, frames[0][0]) else f"{text} at {path}:{line}"


@contextmanager
def named(policy: object) -> Iterator[None]:
    """Turn errors of a policy's code, which may be the user's, into one that names it.

    Raises:
        InvalidInputError: the policy raised, or would have ended the interpreter.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        raise InvalidInputError(
            f"Policy {type(policy).__name__} raised {raised(error)}: mend it first."
        ) from error
