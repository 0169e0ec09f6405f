"""The only package that uses private parts of Optuna; a test pins each of them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# First, before any module that uses Optuna's private parts: its version is checked.
from optuna_hermes._optuna import _supported as _supported

# isort: split
from optuna_hermes._optuna._heartbeats import fail_dead_trials as fail_dead_trials
from optuna_hermes._optuna._plain import SharingTerms as SharingTerms
from optuna_hermes._optuna._plain import begin_trial as begin_trial
from optuna_hermes._optuna._plain import end_trial as end_trial
from optuna_hermes._optuna._plain import session_of as session_of
from optuna_hermes._optuna._plain import turn as turn
from optuna_hermes._optuna._plain import wait_for_device as wait_for_device
from optuna_hermes._optuna._retry import with_retry as with_retry
from optuna_hermes._optuna._samplers import StudyView as StudyView
from optuna_hermes._optuna._samplers import as_seen as as_seen
from optuna_hermes._optuna._samplers import fixed_list as fixed_list
from optuna_hermes._optuna._samplers import is_feasible as is_feasible
from optuna_hermes._optuna._samplers import is_proposed as is_proposed
from optuna_hermes._optuna._samplers import keeps_nothing as keeps_nothing
from optuna_hermes._optuna._samplers import learns as learns
from optuna_hermes._optuna._samplers import left_to_propose as left_to_propose
from optuna_hermes._optuna._samplers import nested as nested
from optuna_hermes._optuna._samplers import nested_pruners as nested_pruners
from optuna_hermes._optuna._samplers import raised_in as raised_in
from optuna_hermes._optuna._samplers import read_anew as read_anew
from optuna_hermes._optuna._samplers import repeated as repeated
from optuna_hermes._optuna._samplers import reseed as reseed
from optuna_hermes._optuna._samplers import tries_all as tries_all
from optuna_hermes._optuna._storages import close_connections as close_connections
from optuna_hermes._optuna._storages import create_study as create_study
from optuna_hermes._optuna._storages import database_errors as database_errors
from optuna_hermes._optuna._storages import delete_study as delete_study
from optuna_hermes._optuna._storages import disconnect as disconnect
from optuna_hermes._optuna._storages import for_workers as for_workers
from optuna_hermes._optuna._storages import is_inheritable as is_inheritable
from optuna_hermes._optuna._storages import is_late as is_late
from optuna_hermes._optuna._storages import load_study as load_study
from optuna_hermes._optuna._storages import no_such_study as no_such_study
from optuna_hermes._optuna._storages import prepare_storages as prepare_storages
from optuna_hermes._optuna._storages import read_trials as read_trials
from optuna_hermes._optuna._storages import read_trials_once as read_trials_once
from optuna_hermes._optuna._storages import rest as rest
from optuna_hermes._optuna._storages import settle_reports as settle_reports
from optuna_hermes._optuna._storages import storage_errors as storage_errors
from optuna_hermes._optuna._storages import study_names as study_names
from optuna_hermes._optuna._studies import Study as Study
from optuna_hermes._optuna._studies import asked_to_stop as asked_to_stop
from optuna_hermes._optuna._studies import checkpoint_root as checkpoint_root
from optuna_hermes._optuna._studies import checkpoint_url as checkpoint_url
from optuna_hermes._optuna._studies import facts as facts
from optuna_hermes._optuna._studies import identity as identity
from optuna_hermes._optuna._studies import ids_return as ids_return
from optuna_hermes._optuna._studies import is_apart as is_apart
from optuna_hermes._optuna._studies import is_deleted as is_deleted
from optuna_hermes._optuna._studies import is_locked as is_locked
from optuna_hermes._optuna._studies import known_key as known_key
from optuna_hermes._optuna._studies import ledger_url as ledger_url
from optuna_hermes._optuna._studies import optimize_loop as optimize_loop
from optuna_hermes._optuna._studies import shared as shared
from optuna_hermes._optuna._studies import shares_its_ledger as shares_its_ledger
from optuna_hermes._optuna._studies import sign as sign
from optuna_hermes._optuna._studies import state_dir as state_dir
from optuna_hermes._optuna._studies import stopped_by_copies as stopped_by_copies
from optuna_hermes._optuna._studies import study_key as study_key
from optuna_hermes._optuna._studies import study_keys as study_keys
from optuna_hermes._optuna._studies import study_seed as study_seed
from optuna_hermes._optuna._studies import study_spec as study_spec
from optuna_hermes._optuna._studies import trial_folder as trial_folder
from optuna_hermes._optuna._trials import SECONDS_ATTRIBUTE as SECONDS_ATTRIBUTE
from optuna_hermes._optuna._trials import STATE_ATTRIBUTE as STATE_ATTRIBUTE
from optuna_hermes._optuna._trials import Note as Note
from optuna_hermes._optuna._trials import choices_advice as choices_advice
from optuna_hermes._optuna._trials import complete_trial as complete_trial
from optuna_hermes._optuna._trials import end_of as end_of
from optuna_hermes._optuna._trials import ending as ending
from optuna_hermes._optuna._trials import fail_trial as fail_trial
from optuna_hermes._optuna._trials import listed_params as listed_params
from optuna_hermes._optuna._trials import on_report as on_report
from optuna_hermes._optuna._trials import open_trial as open_trial
from optuna_hermes._optuna._trials import opened_by as opened_by
from optuna_hermes._optuna._trials import ours as ours
from optuna_hermes._optuna._trials import params_of as params_of
from optuna_hermes._optuna._trials import params_of_id as params_of_id
from optuna_hermes._optuna._trials import pruned as pruned
from optuna_hermes._optuna._trials import reattach as reattach
from optuna_hermes._optuna._trials import replace_params as replace_params
from optuna_hermes._optuna._trials import report as report
from optuna_hermes._optuna._trials import reported_steps as reported_steps
from optuna_hermes._optuna._trials import set_attributes as set_attributes
from optuna_hermes._optuna._trials import should_prune as should_prune
from optuna_hermes._optuna._trials import trial_id as trial_id
from optuna_hermes._optuna._trials import trial_states as trial_states
from optuna_hermes._optuna._trials import write_value as write_value
from optuna_hermes.ledger._secrets import without_password as without_password

if TYPE_CHECKING:
    from optuna_hermes._optuna._commands import log_warnings_only as log_warnings_only
    from optuna_hermes._optuna._commands import optuna_verbs as optuna_verbs
    from optuna_hermes._optuna._commands import run_optuna_cli as run_optuna_cli
    from optuna_hermes._optuna._local_ledgers import claim_ledger as claim_ledger
    from optuna_hermes._optuna._retrying_storage import flush_reports as flush_reports
    from optuna_hermes._optuna._retrying_storage import keep_reports as keep_reports
    from optuna_hermes._optuna._retrying_storage import retrying as retrying
    from optuna_hermes._optuna._retrying_storage import tell as tell
    from optuna_hermes._optuna._surrogate_sampler import SurrogateSampler as SurrogateSampler
    from optuna_hermes._optuna._surrogate_sampler import load_sampler as load_sampler


_HOMES = {
    **dict.fromkeys(("log_warnings_only", "optuna_verbs", "run_optuna_cli"), "_commands"),
    **dict.fromkeys(("flush_reports", "keep_reports", "retrying", "tell"), "_retrying_storage"),
    "claim_ledger": "_local_ledgers",
    **dict.fromkeys(("SurrogateSampler", "load_sampler"), "_surrogate_sampler"),
}


def __getattr__(name: str) -> Any:
    # A plain study needs neither Optuna's command line nor what only drivers and workers do.
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
