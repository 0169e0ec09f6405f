"""``status``: the broker's devices and studies, a study's ledger, or one trial."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from optuna_hermes.cli._output import complain, note, show, show_json
from optuna_hermes.cli._studies import (
    Json,
    OptionalStudyName,
    broker_status,
    facts_and_ledger,
    note_storage_alone,
    optional_storage,
    storage_of,
    study_and_ledger,
)
from optuna_hermes.errors import ExitStatus, InvalidInputError
from optuna_hermes.model import LIVE_STATES, Curve
from optuna_hermes.view.history import live_overrides, total_watt_hours, trial_states
from optuna_hermes.view.source import apart, ask_broker
from optuna_hermes.view.tables import status_view, trial_view

if TYPE_CHECKING:
    from optuna_hermes.broker._protocol import BrokerStatus
    from optuna_hermes.ledger import TrialRecord

Document = dict[str, Any]

# A broker that has just ended with a study keeps it locked until all is written.
_UNLOCK_SECONDS = 1.0


def status(
    context: typer.Context,
    trial: Annotated[
        int | None, typer.Argument(min=0, metavar="[TRIAL]", help="Show this trial's event log.")
    ] = None,
    storage: Annotated[str | None, optional_storage("Show a study's ledger too.")] = None,
    study_name: OptionalStudyName = None,
    probe: Annotated[
        bool,
        typer.Option("--probe", help="Show nothing: status 0 if the broker answers, else 1."),
    ] = False,
    json: Json = False,
) -> int:
    """Show devices with their holders, and suspended trials.

    Without a broker there is nothing to show on this host. With --storage and --study-name a
    study's ledger is shown too, also after its end. With a trial's number: its figures and its
    event log.

    \b
    Example:
      optuna-hermes status --storage sqlite:///study.db --study-name digits
      optuna-hermes status --storage sqlite:///study.db --study-name digits 3
    """
    if probe:
        broker, silence = ask_broker()
        if broker is None:
            return complain(silence or "No broker answers on this host.", ExitStatus.FAILED)
        return 0
    if trial is not None:
        if storage is None or study_name is None:
            raise InvalidInputError(
                f"A trial's event log needs its study but got trial {trial} alone: add --storage "
                "URL and --study-name NAME."
            )
        document, silence = trial_document(storage, study_name, trial)
        if silence:
            note(silence)
        if json:
            show_json(document)
        else:
            show(trial_view(document))
        return 0
    if study_name is None:
        note_storage_alone(context)
        broker, silence, study = broker_status(curves=True), "", None
    else:
        broker, silence = ask_broker(curves=True)
        if silence:
            note(silence)
        place = storage_of(storage, study_name)
        broker, study = _study_document(place, study_name, broker, silent=bool(silence))
    silent = bool(silence)
    if json:
        show_json({"broker": msgspec.to_builtins(broker), "silent": silent, "study": study})
    else:
        show(status_view(broker, study, silent=silent))
    return 0


def _study_document(
    storage: str, name: str, broker: BrokerStatus | None, *, silent: bool
) -> tuple[BrokerStatus | None, Document]:
    """The broker's status, see ``apart``, and what the ledger of a study has."""
    from optuna_hermes.ledger import live_hosts

    with facts_and_ledger(storage, name) as (facts, ledger):
        broker = apart(broker, facts)
        key, hosts = str(facts.key), live_hosts(ledger)
        records, curves = ledger.load_trials(key), ledger.load_curves(key)
        served = silent or (broker is not None and broker.study(key) is not None)
        elsewhere = not served and ledger.is_locked(key, _UNLOCK_SECONDS)
        states = trial_states(ledger, facts, records, broker, silent=silent, hosts=hosts)
        overrides = live_overrides(ledger, key, states)
    trials = [
        {
            "trial": record.number,
            "state": states[record.number],
            "override": overrides.get(record.number),
            "tier": record.tier,
            "host": record.host,
            "units": curve.units,
            "units_trained": max(record.units, curve.units),
            "value": facts.sign * curve.values[-1] if curve.values else None,
            **_figures(record),
        }
        for record in records
        for curve in [curves.get(record.number, Curve())]
    ]
    best = min(
        (
            (value, number)
            for number, curve in curves.items()
            if states.get(number, "failed") != "failed"  # which is never the best one
            for value in filter(math.isfinite, curve.values)
        ),
        default=None,
    )
    return broker, {
        "key": key,
        "name": name,
        "counts": dict(Counter(states.values())),
        # Trials that plain Optuna has trained.
        "others": dict(Counter(end for n, end in facts.ends.items() if n not in states)),
        "device_seconds": sum(record.device_seconds for record in records),
        "watt_hours": total_watt_hours(records),
        "best": best and {"trial": best[1], "value": facts.sign * best[0]},
        "hosts": [
            {"host": host.name, "devices": len(host.devices), "load": host.load} for host in hosts
        ],
        "elsewhere": elsewhere,
        "trials": trials,
    }


def _figures(record: TrialRecord) -> Document:
    return {
        "slices": record.slices,
        "suspensions": record.suspensions,
        "device_seconds": record.device_seconds,
        "watt_hours": record.watt_hours,
    }


def trial_document(storage: str, name: str, number: int) -> tuple[Document, str]:
    """The figures and the event log of one trial, as plain JSON.

    With it comes the reason why a broker of this host tells nothing, see ``ask_broker``.

    Raises:
        InvalidInputError: the study has no such trial, or it was never suspended by this package.
        StorageError: as ``study_and_ledger``.
    """
    from optuna_hermes import _optuna

    broker, silence = ask_broker()
    with study_and_ledger(storage, name) as (study, ledger):
        key, trials = _optuna.study_key(study), _optuna.trial_states(study)
        records = ledger.load_trials(key)
        record = next((each for each in records if each.number == number), None)
        if record is None:
            if number in trials:
                raise InvalidInputError(
                    f"Trial {number} of study {study.study_name!r} has no event log, for it never "
                    "had a device of this package's: see `optuna-hermes trials`."
                )
            numbers = f"0 to {len(trials) - 1}" if trials else "none yet"
            raise InvalidInputError(
                f"Study {study.study_name!r} has no trial {number} (there: {numbers}): name one of "
                "those."
            )
        # With its trials: a journal or a proxy gives all of them for each read.
        facts = _optuna.facts(study, trials)
        broker = apart(broker, facts)
        states = trial_states(ledger, facts, [record], broker, silent=bool(silence))
        curves = ledger.load_curves(key)
        curve = _curve(curves.get(number), _optuna.sign(study))
        document = {
            "study": study.study_name,
            "trial": number,
            "state": states[number],
            "override": live_overrides(ledger, key, states).get(number),
            "where": _where(record, states[number], broker),
            "params": _optuna.params_of_id(study, record.trial_id) if number in trials else {},
            "curve": curve,
            "standing": _rank_at_age(curves, number, states[number], records),
            # Its row is written at the end of a slice.
            "units_trained": max(record.units, curve["units"]),
            **_figures(record),
            "submitted": record.submitted,
            "updated": record.updated,
            "checkpoints": [
                {
                    "path": each.checkpoint.path,
                    "units": each.checkpoint.units,
                    "size_bytes": each.checkpoint.size_bytes,
                    "at": each.at,
                }
                for each in ledger.load_checkpoints(key, [number])
            ],
            "events": [
                {"at": each.at, "kind": each.kind, "detail": each.detail}
                for each in ledger.load_events(key, number)
            ],
        }
    return document, silence


def _where(record: TrialRecord, state: str, broker: BrokerStatus | None) -> Document:
    tier, device = record.tier, None
    # No tier once it is over, or before it has any, though the ledger may still name one.
    if state in ("done", "failed", "pending"):
        tier = None
    elif state == "stored":
        tier = "disk"
    else:
        served = None if broker is None else broker.study(record.study)
        for row in served.trials if served else ():
            if row.number == record.number:
                tier, device = row.tier, row.device
    return {"host": record.host, "tier": tier, "device": device}


def _rank_at_age(
    curves: Mapping[int, Curve], number: int, state: str, records: Sequence[TrialRecord]
) -> Document | None:
    """Rank of a trial at equal age, by which it waits or trains; None where it has none."""
    from optuna_hermes.policies import rank_at_age

    if state not in LIVE_STATES:
        return None
    done = (each.number for each in records if each.state == "done")
    units = (curves[each].units for each in done if each in curves)
    # A whole training has the most units of a trial that is done.
    found = rank_at_age(curves, number, max(units, default=None))
    return None if found is None else asdict(found)


def _curve(curve: Curve | None, sign: float) -> Document:
    if curve is None or not curve.units:
        return {"units": 0, "values": [], "steps": [], "best": None}
    values = [sign * value for value in curve.values]
    finite = [(sign * value, unit) for unit, value in enumerate(values, 1) if math.isfinite(value)]
    best = min(finite, default=None)
    return {
        "units": len(values),
        "values": values,
        "steps": list(curve.steps),
        "best": best and {"value": sign * best[0], "unit": best[1]},
    }
