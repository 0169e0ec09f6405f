"""The trials of live processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optuna_hermes import _optuna
from optuna_hermes.ledger import Ledger, live_hosts
from optuna_hermes.model import LIVE_STATES


def held_trials(
    status: Mapping[str, Any] | None, study: _optuna.Study, ledger: Ledger
) -> frozenset[int]:
    """The unfinished trials of a study that belong to a live process, on any host.

    Args:
        status: status of this host's broker, None if there is no broker.
        study: the study.
        ledger: its ledger, which has the trials of other hosts.
    """
    owners = {host.instance for host in live_hosts(ledger)}
    runs = ledger.load_runs(_optuna.known_key(study) or "")
    elsewhere = (run.number for run in runs if run.owner in owners and run.state in LIVE_STATES)
    return _held_here(status, study).union(elsewhere)


def _held_here(status: Mapping[str, Any] | None, study: _optuna.Study) -> frozenset[int]:
    entries = [] if status is None else status["studies"]
    key = _optuna.known_key(study)
    entry = next((each for each in entries if each["key"] == key), None)
    if entry is None:
        return frozenset()
    if entry["driver_pid"] is not None:  # the driver may resume any of them at any moment
        trials = study.get_trials(deepcopy=False)
        return frozenset(t.number for t in trials if not t.state.is_finished())
    return frozenset(r["trial"] for r in entry["runs"] if r["state"] in ("running", "parked"))
