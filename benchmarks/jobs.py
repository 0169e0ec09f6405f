"""Schedulers on published traces of jobs and of nodes.

    python benchmarks/jobs.py --traces DIR [--json] [--out benchmarks/results] [--check]

DIR has `philly/`, `helios/` and `elastic/`, or some of them; each part is left out where its
traces are missing. With `--json` it prints a list of rows, each with `trace`, `policy`,
`mean_completion_seconds`, `mean_queueing_seconds`, `p99_completion_seconds`, `utilisation`,
`utility` and `delayed_fraction` (null where a trace does not say), and what else there is to
know; otherwise Markdown. With `--out` it writes `jobs.md`. With `--check` the exit status is 1 if a
target of Philly's jobs is missed. The parts stand in modules of their own, whose first lines say
what is replayed and how.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

# One thread in each process; before numpy is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import _energy_rows
import _jobs_elastic
import _jobs_philly

from optuna_hermes.cli._output import libraries_to_stderr
from optuna_hermes.errors import HermesError

PARTS = {
    "Jobs of Philly": (("philly/jobs.csv.gz",), _jobs_philly),
    "Elastic jobs": (("elastic/workloads",), _jobs_elastic),
    "Nodes powered down": (("philly/nodes_per_minute.csv.gz", "helios"), _energy_rows),
}
"""Comparisons: one of these files or folders must be there, and the module that has the rows
(``rows(folder)``), their Markdown (``text(rows)``) and, in its first lines, the setting."""


def main() -> int:
    options = _options()
    if options.out:  # before all that takes long
        options.out.mkdir(parents=True, exist_ok=True)
    found: list[dict[str, Any]] = []
    written = ["# Schedulers on traces of jobs and nodes", "", f"`{_command()}`", ""]
    try:
        for title, (needed, part) in PARTS.items():
            if any((options.traces / each).exists() for each in needed):
                with libraries_to_stderr():  # HiGHS leaves lines of debugging
                    rows = list(part.rows(options.traces))
                found += rows
                written += [f"## {title}", "", *_setting(part), "", part.text(rows)]
    except HermesError as error:
        print(error, file=sys.stderr)
        return 2
    if not found:
        print(f"--traces must name a folder with philly/ but got {options.traces}", file=sys.stderr)
        return 2
    text = "\n".join(written).rstrip() + "\n"
    if options.out:
        (options.out / "jobs.md").write_text(text)
    print(json.dumps(_finite(found), indent=1) if options.json else text)
    return int(options.check and bool(_jobs_philly.missed(found)))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path, required=True, metavar="DIR")
    parser.add_argument("--json", action="store_true", help="print a list of rows")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write jobs.md there")
    parser.add_argument("--check", action="store_true", help="status 1 if a target is missed")
    return parser.parse_args()


def _command() -> str:
    return "python benchmarks/jobs.py --traces DIR --out benchmarks/results"


def _setting(part: Any) -> list[str]:
    """The paragraphs of a module's first lines that are not its title and not commands."""
    paragraphs = part.__doc__.strip().split("\n\n")[1:]
    return "\n\n".join(each for each in paragraphs if not each.startswith(" ")).split("\n")


def _finite(value: Any) -> Any:
    """JSON has no infinity."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    sys.exit(main())
