"""Check of Optuna's version; imported first, before any module that uses its private parts."""

from __future__ import annotations

import optuna

from optuna_hermes._versions import require

require("optuna", optuna.__version__)
