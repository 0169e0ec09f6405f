"""Maintenance of a study: overrides of trials, finishing them, and garbage collection."""

from __future__ import annotations

from optuna_hermes.upkeep._files import Litter as Litter
from optuna_hermes.upkeep._files import find_litter as find_litter
from optuna_hermes.upkeep._files import remove as remove
from optuna_hermes.upkeep._files import with_deleted as with_deleted
from optuna_hermes.upkeep._finish import finish as finish
from optuna_hermes.upkeep._finish import held_trials as held_trials
from optuna_hermes.upkeep._finish import plan_finish as plan_finish
from optuna_hermes.upkeep._finish import served as served
from optuna_hermes.upkeep._overrides import change_policy as change_policy
from optuna_hermes.upkeep._overrides import finish_live as finish_live
from optuna_hermes.upkeep._overrides import want as want
from optuna_hermes.upkeep._rows import Rows as Rows
from optuna_hermes.upkeep._rows import find_rows as find_rows
from optuna_hermes.upkeep._rows import remove_rows as remove_rows
