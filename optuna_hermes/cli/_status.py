"""``status``: the broker's devices and studies, a study's ledger, or one trial."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optuna_hermes.cli._output import show, show_json
from optuna_hermes.cli._studies import Json, broker_status, facts_and_ledger, storage_of
from optuna_hermes.errors import InvalidInputError
from optuna_hermes.model import LIVE_STATES

if TYPE_CHECKING:
    from optuna_hermes._tables import StudyFacts
    from optuna_hermes.ledger import HostRecord, Ledger, TrialRecord
    from optuna_hermes.model import Wish


def status(
    trial: Annotated[
        int | None, typer.Argument(min=0, metavar="[TRIAL]", help="Tell this trial's story.")
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(envvar="OPTUNA_STORAGE", metavar="URL", help="Show a study's ledger too."),
    ] = None,
    study_name: Annotated[
        str | None, typer.Option(metavar="NAME", help="That study's name.")
    ] = None,
    json: Json = False,
) -> None:
    """Show devices with their holders, and suspended trials.

    Without a broker there is nothing to show on this host. With --storage and --study-name a
    study's ledger is shown too, also after its end. With a trial's number its story is told.

    \b
    Example:
      optuna-hermes status --storage sqlite:///study.db --study-name digits
      optuna-hermes status --storage sqlite:///study.db --study-name digits 3
    """
    if trial is not None:
        _tell(trial, storage, study_name, as_json=json)
        return
    document: dict[str, Any] = {"broker": broker_status(curves=True), "study": None}
    if study_name is not None:
        storage = storage_of(storage, study_name)
        document["study"] = _ledger_document(storage, study_name, document["broker"])
    if json:
        show_json(document)
        return
    from optuna_hermes.view import status_view

    show(status_view(document))


def _tell(number: int, storage: str | None, name: str | None, *, as_json: bool) -> None:
    from optuna_hermes.cli._trial import trial_document
    from optuna_hermes.view import trial_view

    if storage is None or name is None:
        raise InvalidInputError(
            f"A trial's story needs its study but got trial {number} alone: add --storage URL and "
            "--study-name NAME."
        )
    document = trial_document(storage, name, number, broker_status())
    if as_json:
        show_json(document)
    else:
        show(trial_view(document))


def _ledger_document(storage: str, name: str, broker: dict[str, Any] | None) -> dict[str, Any]:
    from optuna_hermes.ledger import live_hosts

    with facts_and_ledger(storage, name) as (facts, ledger):
        hosts = live_hosts(ledger)
        runs = _runs(facts, ledger, broker, hosts)
    finite = [run for run in runs if run["value"] is not None and math.isfinite(run["value"])]
    known = [run["watt_hours"] for run in runs if run["watt_hours"] is not None]
    best = min(finite, key=lambda run: facts.sign * run["value"], default=None)
    return {
        "name": name,
        "counts": dict(Counter(run["state"] for run in runs)),
        "device_seconds": sum(run["device_seconds"] for run in runs),
        "watt_hours": sum(known) if known else None,
        "best": best and {"trial": best["trial"], "value": best["value"]},
        "hosts": [
            {"host": host.name, "devices": len(host.devices), "load": host.load} for host in hosts
        ],
        "trials": runs,
    }


def _runs(
    facts: StudyFacts, ledger: Ledger, broker: dict[str, Any] | None, hosts: list[HostRecord]
) -> list[dict[str, Any]]:
    from optuna_hermes.view import holds, serves, state_of

    key = str(facts.key)
    served, ends = serves(broker, key), facts.ends
    alive = {host.instance for host in hosts}
    stored = {checkpoint.number for checkpoint in ledger.load_checkpoints(key)}
    values, wishes = ledger.last_values(key), ledger.load_wishes(key)
    return [
        _run(
            run,
            state=state_of(
                run,
                ends.get(run.number),
                held=holds(run, served=served, alive=alive),
                stored=run.number in stored,
            ),
            value=facts.sign * values[run.number] if run.number in values else None,
            wish=wishes.get(run.number),
        )
        for run in ledger.load_trials(key)
    ]


def _run(run: TrialRecord, *, state: str, value: float | None, wish: Wish | None) -> dict[str, Any]:
    return {
        "trial": run.number,
        "state": state,
        "wish": wish if state in LIVE_STATES else None,
        "tier": run.tier,
        "host": run.host,
        "units": run.units,
        "value": value,
        "slices": run.slices,
        "suspensions": run.suspensions,
        "device_seconds": run.device_seconds,
        "watt_hours": run.watt_hours,
    }
