"""The commands and programs of the README and of the examples run."""

from __future__ import annotations

import contextlib
import functools
import io
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import optuna
import pytest
from optuna.trial import FixedTrial

from optuna_hermes.cli import run
from optuna_hermes.cli._app import GROUPS, VERBS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

pytestmark = pytest.mark.docs

Cli = Callable[..., subprocess.CompletedProcess[str]]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def python(*args: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, args)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


SNIPPETS = [
    pytest.param(b, id=f"{p.name}-{i}") for p in PAGES for i, b in enumerate(blocks(p, "python"))
]


def needs(snippet: str) -> None:
    """Skip the test if a snippet imports what tests do not install."""
    if "import mlflow\n" in snippet:
        pytest.importorskip("mlflow", reason="needs MLflow: pip install mlflow")


COMMANDS = [
    line
    for page in PAGES
    for block in blocks(page, "bash")
    for line in block.splitlines()
    if line.startswith("optuna-hermes ")
]


UNITS = [block for page in PAGES for block in blocks(page, "ini")]


@functools.cache
def flags_of(*verb: str) -> frozenset[str]:
    """The flags in the help of a verb."""
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        try:
            status: object = run((*verb, "--help"))
        except SystemExit as ended:  # of Optuna's verbs
            status = ended.code
    assert status == 0, verb
    return flags_in(shown.getvalue())


def flags_in(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text))


@pytest.mark.parametrize("unit", UNITS)
def test_every_unit_of_systemd_starts_what_exists(unit: str) -> None:
    """The command that a service starts is a verb of this program, with flags that it has."""
    (command,) = re.findall(r"^ExecStart=\S+/optuna-hermes (.*)$", unit, re.MULTILINE)
    flags = flags_in(command)
    assert flags
    assert flags <= flags_of(command.split()[0])


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_every_python_snippet_runs(snippet: str, tmp_path: Path) -> None:
    """A reader who copies a snippet gets what it promises."""
    needs(snippet)
    script = tmp_path / "snippet.py"
    script.write_text(snippet)
    done = python(script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_every_snippet_that_starts_a_study_has_a_guard(snippet: str) -> None:
    """Workers import the file of their objective: what starts a study must not run then."""
    for call in re.findall(r"^(?:\w+\.)?optimize\(", snippet, re.MULTILINE):
        pytest.fail(f'{call} belongs under `if __name__ == "__main__":`')


@pytest.mark.slow
@pytest.mark.parametrize("snippet", [each for each in SNIPPETS if "objective(" in each.values[0]])
def test_every_snippet_is_a_file_for_the_command_line(
    snippet: str, tmp_path: Path, storage_url: str, cli: Cli
) -> None:
    """``optimize FILE.py:objective`` takes a copied snippet as it stands."""
    needs(snippet)
    script = tmp_path / "snippet.py"
    script.write_text(snippet)
    study = ("--storage", storage_url, "--study-name", "s")
    done = cli("optimize", f"{script}:objective", *study, "--n-trials", 1, "--devices", "cpu:1")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_exists_with_its_flags(command: str) -> None:
    """The verbs and flags of the pages are those of the program."""
    # What `launch` starts stands behind `--`.
    own, _, started = command.partition(" -- ")
    words = own.split()
    verb = words[1:3] if words[1] in GROUPS else words[1:2]
    assert flags_in(own) <= flags_of(*verb)
    assert flags_in(started) <= flags_of("optimize")


def test_the_diff_adds_at_most_four_lines() -> None:
    """The first screen shows how little has to change."""
    (diff,) = blocks(ROOT / "README.md", "diff")
    assert sum(line.startswith("+") for line in diff.splitlines()) <= 4


def test_the_set_up_is_two_command_lines() -> None:
    """One line installs and runs the main job, one runs the tests."""
    lines = [
        line for line in (ROOT / "README.md").read_text().splitlines() if "pip install" in line
    ]
    assert lines == [
        'python -m pip install -c constraints.txt -e ".[lightning]" && optuna-hermes quickstart',
        "python -m pip install nox && python -m nox -s tests",
    ]


def test_the_site_builds(tmp_path: Path) -> None:
    """Every page is in the site, every link and every name of the reference leads somewhere."""
    words = ("-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path)
    done = python(*words, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    shown = (tmp_path / "reference-cli" / "index.html").read_text()
    assert all(f'id="{verb}"' in shown for verb in VERBS)


def test_every_environment_variable_has_a_row() -> None:
    """All that this package reads, but for the mark of the processes that it starts."""
    names = re.compile(r"\bOPTUNA_HERMES_[A-Z_]+")
    read = {
        each
        for file in (ROOT / "optuna_hermes").rglob("*.py")
        for each in names.findall(file.read_text())
    }
    page = (ROOT / "docs" / "operations.md").read_text()
    told = set(re.findall(r"^\| `(OPTUNA_HERMES_[A-Z_]+)` \|", page, re.MULTILINE))
    assert told == read - {"OPTUNA_HERMES_INSIDE"}


def test_links_lead_somewhere() -> None:
    """Files that the pages link to are there."""
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert target.startswith("http") or (page.parent / target).exists(), target


EXAMPLES: dict[str, dict[str, object]] = {
    "digits_lightning": {"lr": 0.01, "weight_decay": 1e-6, "width": 32, "dropout": 0.0},
    "plain_optuna": {"alpha": 1e-4, "learning_rate": "constant", "eta0": 0.1},
    "pytorch_loop": {"lr": 0.01, "width": 32, "dropout": 0.0},
}
"""Parameters of those that need nothing but what every test needs."""


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_an_example_tunes_learns_something(name: str) -> None:
    """One trial, in this process."""
    objective = runpy.run_path(str(ROOT / "examples" / f"{name}.py"))["objective"]
    assert objective(FixedTrial(EXAMPLES[name])) < 0.5


@pytest.mark.slow
def test_the_lightning_example_is_an_objective_for_the_command_line(
    cli: Cli, storage_url: str
) -> None:
    """The example is what ``optimize`` is given in the README."""
    target = f"{ROOT}/examples/digits_lightning.py:objective"
    study = ("--storage", storage_url, "--study-name", "digits")
    done = cli("optimize", target, *study, "--n-trials", 2, "--devices", "cpu:2")
    assert done.returncode == 0, done.stderr
    assert len(optuna.load_study(study_name="digits", storage=storage_url).trials) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("huggingface_trainer", "lightgbm_boosting", "plain_optuna", "pytorch_loop"),
        *("sklearn_partial_fit", "xgboost_boosting"),
    ],
)
def test_the_examples_run(name: str, tmp_path: Path) -> None:
    """They are tuned by running their scripts; what they tune runs in other tests too."""
    done = python(ROOT / "examples" / f"{name}.py", 2, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Best of 2" in done.stdout
