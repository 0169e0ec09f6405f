"""Runs the test trees of Optuna, optuna-integration and Lightning, without and with Hermes.

    python tests/peers/compare.py FOLDER [--only "optuna/study;lightning/loops"] [--results FOLDER]

FOLDER has checkouts of the versions that are installed, ``optuna``, ``optuna-integration`` and
``pytorch-lightning``; what is not there is left out. Ends with status 1 if a test fails only with
Hermes, and ``docs/peers.md`` does not expect that.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import outcomes

HERE = Path(__file__).parent
EXPECTED = HERE.parents[1] / "docs" / "peers.md"
TIMEOUT_SECONDS = 300


@dataclass(frozen=True, kw_only=True)
class Tree:
    """A folder of tests, and how it is run.

    Args:
        name: as the table, and ``--only``, call it.
        root: the folder in which its tests are run.
        path: what is run of it.
        plugin: what puts Hermes in place, of those beside this file.
        options: of both runs.
        hermes: of the run with Hermes.
    """

    name: str
    root: str
    path: str
    plugin: str
    options: tuple[str, ...] = ()
    hermes: tuple[str, ...] = ("--hermes",)

    @property
    def without(self) -> str:
        """A name for the run without Hermes, which other trees may share."""
        return "-".join([self.path.replace("/", "_"), *self.options, "without"])


def trees() -> Iterator[Tree]:
    """All that are compared."""
    for part in ("samplers", "pruners", "study", "trial"):
        for storage, options in (("memory", ()), ("SQLite", ("--sqlite",))):
            yield Tree(
                name=f"optuna/{part}, {storage}",
                root="optuna",
                path=f"tests/{part}_tests",
                plugin="with_optuna",
                options=("-m", "not slow", *options),
            )
    yield Tree(
        name="optuna-integration",
        root="optuna-integration",
        path="tests",
        plugin="with_optuna",
        # Most of them need a library of their own.
        options=("--continue-on-collection-errors",),
    )
    for part in ("loops", "checkpointing", "callbacks", "trainer"):
        for tiers in ("memory", "disk"):
            yield Tree(
                name=f"lightning/{part}, {tiers}",
                root="pytorch-lightning",
                path=f"tests/tests_pytorch/{part}",
                plugin="with_lightning",
                hermes=(f"--hermes={tiers}",),
            )


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Outcomes of a tree's tests.

    Args:
        tree: the tree.
        without: how each test ended without Hermes.
        with_: how each test ended with Hermes.
        unsteady: tests that failed with Hermes once, and passed when they were run again.
    """

    tree: Tree
    without: dict[str, outcomes.Outcome]
    with_: dict[str, outcomes.Outcome]
    unsteady: frozenset[str]

    @property
    def broken(self) -> list[str]:
        """Tests that fail, or are not reached, only with Hermes."""
        return [test for test in only_with(self.without, self.with_) if test not in self.unsteady]


def only_with(
    without: dict[str, outcomes.Outcome], with_: dict[str, outcomes.Outcome]
) -> list[str]:
    """Tests that passed without Hermes, and do not with it."""
    return [
        test
        for test, outcome in sorted(without.items())
        if outcome == "passed" and with_.get(test) != "passed"
    ]


def run(folder: Path, tree: Tree, file: Path, hermes: Sequence[str], tests: Sequence[str]) -> None:
    """Run tests of a tree; how they end is written into ``file``, if that is not there."""
    if file.exists():
        return
    partial = file.with_suffix(".part")
    partial.unlink(missing_ok=True)
    command = [
        *(sys.executable, "-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider"),
        *("-p", "outcomes", "-p", tree.plugin, "--outcomes", str(partial)),
        *("--timeout", str(TIMEOUT_SECONDS), *tree.options, *hermes, *tests),
    ]
    path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    # A GPU would be tested as well, and neither with nor without is that meant.
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    with file.with_suffix(".log").open("wb") as log:
        subprocess.run(
            command, cwd=folder / tree.root, env=environment, stdout=log, stderr=log, check=False
        )
    partial.touch()
    partial.rename(file)


def compare(folder: Path, tree: Tree, results: Path) -> Comparison:
    """Run a tree without and with Hermes, and again what failed only with it."""
    name = re.sub(r"\W+", "-", tree.name)
    files = [results / f"{re.sub(r'[^-_a-z]', '', tree.without)}.jsonl"]
    files += [results / f"{name}-{way}.jsonl" for way in ("with", "again")]
    run(folder, tree, files[0], (), [tree.path])
    run(folder, tree, files[1], tree.hermes, [tree.path])
    without, with_ = outcomes.read(files[0]), outcomes.read(files[1])
    failed = only_with(without, with_)
    again: dict[str, outcomes.Outcome] = {}
    if failed:
        run(folder, tree, files[2], tree.hermes, failed)
        again = outcomes.read(files[2])
    unsteady = frozenset(test for test in failed if again.get(test) == "passed")
    return Comparison(tree=tree, without=without, with_=with_, unsteady=unsteady)


def expected(page: Path = EXPECTED) -> list[str]:
    """Patterns of tests that may fail only with Hermes: what the page's tables begin with."""
    return re.findall(r"^\| `([^`]+)` \|", page.read_text(), flags=re.MULTILINE)


def is_expected(test: str, tree: Tree, patterns: Sequence[str]) -> bool:
    """True if a pattern, ``tree: test`` with ``*`` for anything, is that of a test."""
    # Brackets are parts of tests' names.
    return any(
        fnmatch.fnmatchcase(f"{tree.name}: {test}", pattern.replace("[", "[[]"))
        for pattern in patterns
    )


def table(comparisons: Sequence[Comparison]) -> str:
    """Counts without and with Hermes."""
    lines = [
        "| tests of | passed without | failed without | passed with | failed with | only with |",
        "|---|---|---|---|---|---|",
    ]
    for each in comparisons:
        counts = [
            list(ended.values()).count(outcome)
            for ended in (each.without, each.with_)
            for outcome in ("passed", "failed")
        ]
        lines.append(f"| {each.tree.name} | {' | '.join(map(str, [*counts, len(each.broken)]))} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare all trees that are there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="with the checkouts")
    parser.add_argument(
        "--only", default="", help="names of trees, or how they begin, by semicolons"
    )
    parser.add_argument("--results", type=Path, help="keeps what is run, and is not run again")
    options = parser.parse_args(arguments)
    chosen = [
        tree
        for tree in trees()
        if (options.folder / tree.root / tree.path).is_dir()
        and tree.name.startswith(tuple(options.only.split(";")))
    ]
    if not chosen:
        parser.error(f"no tree of tests in {options.folder}: put checkouts there")
    patterns = expected()
    with tempfile.TemporaryDirectory(prefix="peers-") as temporary:
        results = (options.results or Path(temporary)).absolute()
        results.mkdir(parents=True, exist_ok=True)
        comparisons = []
        for tree in chosen:
            comparisons.append(compare(options.folder.absolute(), tree, results))
            print(table(comparisons[-1:]).splitlines()[-1], flush=True)
    print(f"\n{table(comparisons)}\n")
    surprises = 0
    for each in comparisons:
        for test in each.broken:
            known = is_expected(test, each.tree, patterns)
            surprises += not known
            print(f"{'expected' if known else 'BROKEN'}: {each.tree.name}: {test}")
        for test in sorted(each.unsteady):
            print(f"passed the second time: {each.tree.name}: {test}")
    return 1 if surprises else 0


if __name__ == "__main__":
    sys.exit(main())
