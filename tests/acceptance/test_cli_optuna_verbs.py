"""Optuna's own verbs through ``optuna-hermes``, as real processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import optuna
import pytest

from optuna_hermes.cli import run

Cli = Callable[..., "CompletedProcess[str]"]

SPACE = json.dumps(
    {"x": {"name": "FloatDistribution", "attributes": {"low": 0.0, "high": 1.0, "log": False}}}
)


@pytest.fixture
def study(capsys: pytest.CaptureFixture[str], storage_url: str) -> tuple[str, ...]:
    """Options that name a study which ``create-study`` has made."""
    options = ("--storage", storage_url, "--study-name", "digits")
    assert run(("create-study", *options, "--direction", "maximize")) == 0
    assert capsys.readouterr().out == "digits\n"
    return options


def ask(cli: Cli, study: tuple[str, ...], *options: str) -> Any:
    asked = cli("ask", *study, "--sampler", "HermesSampler", "--search-space", SPACE, *options)
    assert asked.returncode == 0, asked.stderr
    return json.loads(asked.stdout)


def test_ask_and_tell(cli: Cli, study: tuple[str, ...], runtime_dir: Path) -> None:
    """A trial is asked of HermesSampler, told, and found again; no broker is started for it."""
    asked = ask(cli, study)
    assert asked["number"] == 0
    assert 0.0 <= asked["params"]["x"] <= 1.0
    told = cli("tell", *study, "--trial-number", "0", "--values", "0.25")
    assert told.returncode == 0, told.stderr
    listed = json.loads(cli("trials", *study, "-f", "json").stdout)
    assert [(t["number"], t["value"], t["state"]) for t in listed] == [(0, 0.25, "COMPLETE")]
    best = json.loads(cli("best-trial", *study, "-f", "json").stdout)
    assert best["number"] == 0
    assert best["params"] == asked["params"]
    assert list(runtime_dir.iterdir()) == []


def test_the_sampler_takes_its_options(cli: Cli, study: tuple[str, ...]) -> None:
    """``--sampler-kwargs`` reaches HermesSampler."""
    assert ask(cli, study, "--sampler-kwargs", '{"policy": "fifo"}')["number"] == 0


def test_studies_are_listed_and_deleted(cli: Cli, study: tuple[str, ...], storage_url: str) -> None:
    """The remaining verbs, of one word and of two, reach Optuna too."""
    listed = json.loads(cli("studies", *study[:2], "-f", "json").stdout)
    assert [entry["name"] for entry in listed] == ["digits"]
    assert cli("storage", "upgrade", *study[:2]).returncode == 0
    assert cli("delete-study", *study).returncode == 0
    assert optuna.get_all_study_names(storage_url) == []


def test_what_optuna_refuses_is_one_line(cli: Cli, study: tuple[str, ...]) -> None:
    """A study that is not there is bad input, without a traceback."""
    done = cli("best-trial", *study[:3], "faces")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ")


def test_an_unknown_verb(cli: Cli) -> None:
    """A verb that is neither ours nor Optuna's is bad input, through a real process too."""
    done = cli("fly")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: No verb 'fly': see `optuna-hermes --help`.\n"
