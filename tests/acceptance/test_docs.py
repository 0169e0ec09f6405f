"""The commands and programs of the README and of the examples run."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import optuna
import pytest

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
COMMANDS = [
    line
    for page in PAGES
    for block in blocks(page, "bash")
    for line in block.splitlines()
    if line.startswith("optuna-hermes ")
]


UNITS = [block for page in PAGES for block in blocks(page, "ini")]


@pytest.mark.parametrize("unit", UNITS)
def test_every_unit_of_systemd_starts_what_exists(unit: str, cli: Cli) -> None:
    """What a service starts is a verb of this program, with flags that it has."""
    (command,) = re.findall(r"^ExecStart=\S+/optuna-hermes (.*)$", unit, re.MULTILINE)
    verb, flags = command.split()[0], re.findall(r"--[a-z-]+", command)
    shown = cli(verb, "--help").stdout
    assert flags
    for flag in flags:
        assert flag in shown


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_every_python_snippet_runs(snippet: str, tmp_path: Path) -> None:
    """A reader who copies a snippet gets what it promises."""
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
    script = tmp_path / "snippet.py"
    script.write_text(snippet)
    study = ("--storage", storage_url, "--study-name", "s")
    done = cli("optimize", f"{script}:objective", *study, "--n-trials", 1, "--devices", "cpu:1")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_exists_with_its_flags(command: str, cli: Cli) -> None:
    """The verbs and flags of the pages are those of the program."""
    # What `launch` starts stands behind `--`.
    own, _, started = command.partition(" -- ")
    words = own.split()
    verb = words[1:3] if words[1] in GROUPS else words[1:2]
    for part, asked in ((own, verb), (started, ["optimize"])):
        flags = re.findall(r"--[a-z-]+", part)
        shown = cli(*asked, "--help").stdout if flags else ""
        for flag in flags:
            assert flag in shown


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


def test_links_lead_somewhere() -> None:
    """Files that the pages link to are there."""
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert target.startswith("http") or (page.parent / target).exists(), target


def test_the_lightning_example_runs(cli: Cli, storage_url: str) -> None:
    """The example is what ``optimize`` is given in the README."""
    done = cli(
        "optimize",
        f"{ROOT}/examples/digits_lightning.py:objective",
        "--storage",
        storage_url,
        "--study-name",
        "digits",
        "--n-trials",
        2,
        "--devices",
        "cpu:2",
    )
    assert done.returncode == 0, done.stderr
    assert len(optuna.load_study(study_name="digits", storage=storage_url).trials) == 2


def test_the_plain_example_runs(tmp_path: Path) -> None:
    """Only sampler and pruner differ from a script without this package."""
    done = python(ROOT / "examples" / "plain_optuna.py", 4, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Best of 4" in done.stdout


def test_the_loop_example_runs(tmp_path: Path) -> None:
    """A loop in plain PyTorch is tuned by running its script."""
    done = python(ROOT / "examples" / "pytorch_loop.py", 2, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Best of 2" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["huggingface_trainer", "lightgbm_boosting", "sklearn_partial_fit", "xgboost_boosting"],
)
def test_the_examples_of_frameworks_run(name: str, tmp_path: Path) -> None:
    """They are tuned by running their scripts; what they tune runs in other tests too."""
    done = python(ROOT / "examples" / f"{name}.py", 2, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Best of 2" in done.stdout
