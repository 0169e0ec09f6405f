"""The result of a call of ``optimize``, as values and as the JSON document of the CLI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from optuna_hermes import _optuna
from optuna_hermes.broker._client._journal import find
from optuna_hermes.broker._protocol import FailureSummary
from optuna_hermes.ledger import Ledger, live_hosts
from optuna_hermes.ledger._records import TrialRecord
from optuna_hermes.model import OverheadKind
from optuna_hermes.view.formats import plural
from optuna_hermes.view.notebook import shown
from optuna_hermes.view.tables import summary_view


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """One trial: ``state`` is Optuna's once it is finished, else STORED or PENDING.

    One that another process trains, also by plain ``study.optimize``, may be PARKED or RUNNING.

    ``units`` counts the units trained, those that were trained twice after a crash included.
    ``watt_hours`` is the energy of its devices, None where it is not measured.
    """

    number: int
    state: str
    value: float | None
    slices: int
    suspensions: int
    device_seconds: float
    units: int
    watt_hours: float | None = None


@dataclass(frozen=True, kw_only=True)
class OptimizeResult:
    """The outcome of ``optimize``.

    Args:
        study: the study's name.
        policy: the policy that decided.
        devices: the devices it decided about.
        elapsed_seconds: duration of this call.
        device_seconds: device time of all trials, earlier calls included.
        spent_seconds: device time of this call.
        switches: suspended trials brought back, in this call.
        overhead_fraction: share of this call's device time, idle devices included, that was
            outside of batches.
        overhead_seconds: that device time by kind: ``idle``, ``opening``, ``resuming``, ``saving``,
            ``suspending``; empty if no broker has told of any.
        best: number, value and parameters of the best finished trial, None if there is none.
        trials: every trial of the study.
        stopped: true if it ended before the study had all its trials.
        interrupted: true if Ctrl-C ended the call.
        suspended: true if another signal, or the end of its job, ended the call before the study
            was done: the same call is to be made again.
        taken_by: the process that goes on with the study, for which this call waited until it had
            to end; None if there is none.
        problem: the reason of an early end, None if there is none.
        problem_may_pass: true if it is of this host and this moment: the same call is to be made
            again.
        failure: the reason why no trial has succeeded or will; None if one has or may.
    """

    study: str
    policy: str
    devices: tuple[str, ...]
    elapsed_seconds: float
    device_seconds: float
    spent_seconds: float
    switches: int
    overhead_fraction: float
    overhead_seconds: Mapping[OverheadKind, float]
    best: dict[str, Any] | None
    trials: tuple[TrialResult, ...] = field(default=())
    stopped: bool = False
    interrupted: bool = False
    suspended: bool = False
    taken_by: int | None = None
    problem: str | None = None
    problem_may_pass: bool = False
    failure: str | None = None

    @property
    def watt_hours(self) -> float | None:
        """Energy of the devices for all trials whose energy is known; None if it is for none."""
        known = [trial.watt_hours for trial in self.trials if trial.watt_hours is not None]
        return sum(known) if known else None

    @property
    def outlook(self) -> str:
        """A sentence on how to go on with unfinished trials; empty if all are finished."""
        if self.taken_by is not None:
            return f"Stopped waiting: process {self.taken_by} goes on with the study."
        if not self.unfinished:
            return ""
        if self.problem is not None and not self.problem_may_pass:
            return f"{self.remainder}."  # the problem says what to do first
        # Optuna has drawn such a name; the script run again would draw another one.
        drawn = f" on the study named {self.study!r}" if self.study.startswith("no-name-") else ""
        return f"{self.remainder}: the same call{drawn} goes on with them."

    @property
    def remainder(self) -> str:
        """Words for the suspended trials, and for those that must begin anew or have not begun."""
        pending, anew = sum(trial.state == "PENDING" for trial in self.trials), self.begins_anew
        unbegun = pending - anew
        words = [f"Stopped with {plural(self.unfinished - pending, 'trial')} suspended"]
        if anew:
            words.append(f"{plural(anew, 'trial')} to begin anew, without a checkpoint")
        if unbegun:
            words.append(f"{plural(unbegun, 'trial')} not begun")
        return " and ".join(words)

    @property
    def begins_anew(self) -> int:
        """The number of trials that have trained, and have no checkpoint."""
        pending = (trial for trial in self.trials if trial.state == "PENDING")
        return sum(1 for trial in pending if trial.units or trial.suspensions)

    @property
    def unfinished(self) -> int:
        """The number of suspended trials, which a later call resumes or begins anew."""
        return sum(1 for t in self.trials if t.state in ("PARKED", "STORED", "PENDING"))

    @property
    def finished(self) -> int:
        """The number of trials that have ended, well or not."""
        return sum(1 for t in self.trials if t.state in ("COMPLETE", "PRUNED", "FAIL"))

    def _repr_mimebundle_(self, **kwargs: object) -> dict[str, str]:
        """The representations that a notebook shows."""
        return shown(summary_view(self.document()))

    def document(self) -> dict[str, Any]:
        """The result as plain JSON."""
        return {
            "study": self.study,
            "policy": self.policy,
            "devices": list(self.devices),
            "elapsed_seconds": self.elapsed_seconds,
            "device_seconds": self.device_seconds,
            "spent_seconds": self.spent_seconds,
            "watt_hours": self.watt_hours,
            "switches": self.switches,
            "overhead_fraction": self.overhead_fraction,
            "overhead_seconds": dict(self.overhead_seconds),
            "best": self.best,
            "failure": self.failure,
            "trials": [asdict(trial) for trial in self.trials],
        }


def trial_results(
    study: optuna.Study,
    ledger: Ledger,
    root: Path | None = None,
    *,
    taken: bool = False,
    broker: str | None = None,
) -> tuple[TrialResult, ...]:
    """Every trial of the study, with its figures from the ledger.

    Args:
        root: the folder of its checkpoints, of which the ledger may lack the last ones.
        taken: another process trains it now.
        broker: the instance that served this call; those of other hosts may train trials now.
    """
    key = _optuna.study_key(study)
    records = {record.number: record for record in ledger.load_trials(key)}
    others = {host.instance for host in live_hosts(ledger)} - {broker} if broker else set()
    elsewhere = {number for number, record in records.items() if record.owner in others}
    stored = {checkpoint.number for checkpoint in ledger.load_checkpoints(key)}
    trials = study.get_trials(deepcopy=False)
    if root is not None:
        live = [trial.number for trial in trials if not trial.state.is_finished()]
        folders = {number: root / _optuna.trial_folder(number) for number in live}
        stored |= {number for number, each in folders.items() if find(each).checkpoints}
    return tuple(
        _trial(
            each,
            records.get(each.number),
            each.number in stored,
            taken or each.number in elsewhere,
        )
        for each in trials
    )


def _trial(
    trial: FrozenTrial, record: TrialRecord | None, stored: bool, taken: bool
) -> TrialResult:
    return TrialResult(
        number=trial.number,
        state=_state(trial, record, stored, taken),
        value=_value(trial),
        slices=record.slices if record else 0,
        suspensions=record.suspensions if record else 0,
        device_seconds=record.device_seconds if record else 0.0,
        units=record.units if record else len(trial.intermediate_values),
        watt_hours=record.watt_hours if record else None,
    )


def _state(trial: FrozenTrial, record: TrialRecord | None, stored: bool, taken: bool) -> str:
    """Optuna's state of a finished trial; STORED, PENDING or the ledger's state of another one."""
    if trial.state != TrialState.RUNNING:
        return str(trial.state.name)
    # The ledger may lack the opening of a trial, or its suspension, if the worker ended first. No
    # worker of this call is alive: a checkpoint makes the trial STORED, else it starts anew.
    if (
        not taken
        and _optuna.ours(trial)
        and (record is None or record.state in ("running", "parked"))
    ):
        return "STORED" if stored else "PENDING"
    return "RUNNING" if record is None else record.state.upper()


def _value(trial: FrozenTrial) -> float | None:
    if trial.values:
        return float(trial.values[0])
    reported = trial.intermediate_values
    return float(reported[max(reported)]) if reported else None


def failure_of(trials: Sequence[TrialResult], failures: FailureSummary | None) -> str | None:
    """The reason why no trial has succeeded or will; None if one has, or may still.

    ``failures`` are those of this call, None if a broker has told of none.
    """
    hopeless = failures is not None and failures.hopeless
    failed = [trial.number for trial in trials if trial.state == "FAIL"]
    if any(trial.state in ("COMPLETE", "PRUNED") for trial in trials) or not failed:
        return None
    # One that was enqueued, and not begun, says nothing.
    if any(trial.state not in ("FAIL", "WAITING") for trial in trials) and not hopeless:
        return None
    what = f"All trials have failed ({len(failed)})"
    first, error = failed[0], ""
    if failures is not None and failures.first is not None:
        first, error = failures.first, failures.error
        if failures.hopeless:
            what = f"The last {failures.alike} trials have failed alike, and none has succeeded"
    return f"{what}. Trial {first}: {one_line(error or 'see its output.log')}."


def one_line(error: str) -> str:
    """The reason of a failure, shortened and without control characters."""
    words = " ".join("".join(c if c.isprintable() else " " for c in error).split())
    return words.rstrip(".") if len(words) <= 300 else f"{words[:300]} [...]"


def best_of(study: optuna.Study) -> dict[str, Any] | None:
    """Number, value and parameters of the best feasible trial; of the first objective's."""
    finished = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    complete = list(filter(_optuna.is_feasible, finished))
    if not complete:
        return None
    sign = _optuna.sign(study)
    best = min(complete, key=lambda trial: (sign * trial.values[0], trial.number))
    return {"number": best.number, "value": best.values[0], "params": dict(best.params)}
