"""The command line: ``optuna-hermes``."""

from __future__ import annotations

import sys
from typing import NoReturn

from optuna_hermes.cli._app import run

__all__ = ["main", "run"]


def main() -> NoReturn:
    """Run the command line of this process and exit with its status."""
    sys.exit(run(sys.argv[1:]))
