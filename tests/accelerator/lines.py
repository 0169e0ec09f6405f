"""The lines that can only run on an accelerator, and which of them its tests run.

    python tests/accelerator/lines.py

Those are the lines that no CPU test runs, of modules that ask for the accelerator: tests that train
and suspend on a CPU are run under ``coverage``, and then the tests on the simulated accelerator. So
lines count that a CPU could run, too, but which no test there makes it run. Exit status 1 if less
than 90 % of them are run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import coverage

ROOT = Path(__file__).resolve().parents[2]
LEAST = 0.9
ASKS = ("suspend._tiers._accelerators import", "torch.accelerator", "OutOfMemoryError")
"""Text in the source of a module that asks for the accelerator, or waits for its errors."""
CPU_TESTS = (
    *("tests/unit/test_accelerators.py", "tests/unit/test_disk.py", "tests/unit/test_fault.py"),
    *("tests/unit/test_copies.py", "tests/unit/test_failed_starts.py"),
    *("tests/unit/test_fingerprint.py", "tests/unit/test_fork_safety.py"),
    *("tests/unit/test_forked.py", "tests/unit/test_host.py", "tests/unit/test_no_room.py"),
    *("tests/unit/test_nothing_unpickled.py", "tests/unit/test_objects.py"),
    *("tests/unit/test_once.py", "tests/unit/test_ranks.py", "tests/unit/test_tree.py"),
    "tests/unit/test_values.py",
    "tests/acceptance/test_foreign_scripts.py::test_cuda_may_be_asked_for_at_import",
    *("tests/contract/test_tiers.py", "tests/integration/test_boosting.py"),
    "tests/integration/test_cooperative.py",
    *("tests/integration/test_lightning_around.py", "tests/integration/test_lightning_exact.py"),
    *("tests/integration/test_nvml.py", "tests/integration/test_once.py"),
    *("tests/integration/test_pytorch.py", "tests/integration/test_unsaved_state.py"),
)
# Without the benchmark, whose processes take minutes.
LEFT_OUT = "--ignore=tests/accelerator/test_gpu_benchmark.py"
ACCELERATOR_TESTS = ("-m", "accelerator", "tests/accelerator", LEFT_OUT)
# Forks that end by os._exit, and workers that are new processes, count too.
CONFIGURATION = """
[run]
parallel = true
patch = subprocess, fork, _exit
include = {include}
data_file = {file}
disable_warnings = no-data-collected, module-not-imported
[report]
exclude_also = raise NotImplementedError
"""


@dataclass(frozen=True, kw_only=True)
class Module:
    """A module, and its lines that no CPU test runs.

    Args:
        only: numbers of these lines.
        left: those that the tests on the accelerator do not run either.
    """

    name: str
    only: frozenset[int]
    left: frozenset[int]


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            _run(Path(folder, name), tests)
            for name, tests in (("cpu", CPU_TESTS), ("accelerator", ACCELERATOR_TESTS))
        ]
        modules = [_compare(path, *runs) for path in _modules()]
    only, left = (
        sum(map(len, parts)) for parts in zip(*((m.only, m.left) for m in modules), strict=True)
    )
    for module in modules:
        if module.only:
            rest = f"; not {_ranges(module.left)}" if module.left else ""
            ran = len(module.only) - len(module.left)
            print(f"{module.name}: {ran} of {len(module.only)}{rest}")
    share = (only - left) / only
    print(f"{only - left} of {only} lines that no CPU test runs: {100 * share:.1f} %")
    return int(share < LEAST)


def _modules() -> Iterator[Path]:
    for path in sorted((ROOT / "optuna_hermes").rglob("*.py")):
        text = path.read_text()
        if path.name == "_accelerators.py" or any(each in text for each in ASKS):
            yield path


def _run(folder: Path, tests: Sequence[str]) -> coverage.Coverage:
    """Run tests; which lines of which files they have run, in all their processes."""
    folder.mkdir()
    include = "".join(f"\n    {path}" for path in _modules())
    configuration = folder / "coveragerc"
    file = folder / "data"
    configuration.write_text(CONFIGURATION.format(include=include, file=file))
    options = ["-p", "no:cacheprovider", "-p", "no:randomly", "-q"]
    command = ["-m", "coverage", "run", f"--rcfile={configuration}", "-m", "pytest"]
    done = subprocess.run([sys.executable, *command, *options, *tests], cwd=ROOT, check=False)
    if done.returncode:
        raise SystemExit("Tests have failed: the figures would say nothing.")
    found = coverage.Coverage(data_file=str(file), config_file=str(configuration))
    found.combine([str(folder)])
    return found


def _compare(path: Path, on_cpu: coverage.Coverage, there: coverage.Coverage) -> Module:
    missing = [frozenset(run.analysis2(str(path))[3]) for run in (on_cpu, there)]
    only, left = missing[0], missing[0] & missing[1]
    return Module(name=os.path.relpath(path, ROOT), only=only, left=left)


def _ranges(lines: frozenset[int]) -> str:
    """Numbers as people write them: ``3, 7-9``."""
    parts: list[list[int]] = []
    for line in sorted(lines):
        if parts and line == parts[-1][-1] + 1:
            parts[-1].append(line)
        else:
            parts.append([line])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)


if __name__ == "__main__":
    sys.exit(main())
