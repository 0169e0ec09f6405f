"""The command line in this process: help, bad input, and what is said at the end of a run."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import json
import os
import socket
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import optuna
import pytest
import sqlalchemy.exc

from optuna_hermes import __version__, _optuna, upkeep
from optuna_hermes._optuna import _retry, _storages
from optuna_hermes.broker._client import _journal
from optuna_hermes.broker._power_commands import PowerCommands
from optuna_hermes.cli import _optuna_verbs, _quickstart, _studies, run
from optuna_hermes.cli._app import VERBS
from optuna_hermes.cli._output import show_json
from optuna_hermes.errors import BrokerError, DatabaseOutageError, InvalidInputError, ObjectiveError
from optuna_hermes.model import Checkpoint
from optuna_hermes.policies import POLICIES
from optuna_hermes.workers import _optimize, _worker_pool
from optuna_hermes.workers._open_study import copies_folder
from optuna_hermes.workers._optimize import OptimizeResult, TrialResult
from optuna_hermes.workers._settings import OptimizeSettings
from support.statuses import broker_status, study_status

STORED = TrialResult(
    number=0,
    state="STORED",
    value=0.5,
    slices=1,
    suspensions=1,
    device_seconds=1.0,
    units=2,
)
RESULT: dict[str, Any] = {
    "study": "digits",
    "policy": "hermes",
    "devices": ("cpu:0",),
    "elapsed_seconds": 2.0,
    "device_seconds": 1.0,
    "spent_seconds": 1.0,
    "switches": 0,
    "overhead_fraction": 0.0,
    "overhead_seconds": {},
    "best": None,
    "trials": (),
}
POWER = ("--power-down-command", "/bin/echo {device}", "--power-up-command", "/bin/echo {device}")
OPTIMIZE = ("optimize", "x.py:f", "--storage", "sqlite:///s.db", "--study-name", "digits")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder to work in; Optuna's verbosity is put back."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name in ("OPTUNA_STORAGE", "OPTUNA_HERMES_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    verbosity = optuna.logging.get_verbosity()
    yield folder
    optuna.logging.set_verbosity(verbosity)


@pytest.fixture
def refuse(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run words that must be refused: status 2, one line on stderr, which is returned."""

    def run_refused(*words: str) -> str:
        status = run(words)
        out, err = capsys.readouterr()
        assert (status, out) == (2, "")
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        return err

    return run_refused


@pytest.fixture
def runs_with(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Let ``run_study`` return a result, or raise; the settings it is called with are kept."""

    def install(**result: Any) -> list[Any]:
        called: list[Any] = []

        def stand_in(study: Any, pool: Any, settings: OptimizeSettings, progress: Any) -> Any:
            called.append(settings)
            if "raises" in result:
                raise result["raises"]
            return OptimizeResult(**{**RESULT, **result})

        monkeypatch.setattr(_optimize, "run_study", stand_in)
        monkeypatch.setattr(_worker_pool, "start", lambda *words: contextlib.nullcontext())
        return called

    return install


# -- help --------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_every_verb_has_an_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """``--help`` explains the verb and shows a command line that can be copied."""
    assert run([verb, "--help"]) == 0
    text = capsys.readouterr().out
    assert "Example:" in text
    assert f"      optuna-hermes {verb}" in text.replace("    optuna-", "      optuna-")


def test_help_of_optimize_names_every_policy(capsys: pytest.CaptureFixture[str]) -> None:
    """The help has all the names that ``--policy`` takes."""
    assert run(["optimize", "--help"]) == 0
    words = set(capsys.readouterr().out.replace(",", " ").replace(";", " ").split())
    assert words.issuperset(POLICIES)


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_help_names_every_verb(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The program's help lists its own verbs, each in a whole sentence, and Optuna's."""
    assert run(words) == 0
    text = capsys.readouterr().out
    for verb in VERBS:
        (line,) = (line for line in text.splitlines() if line.split()[:1] == [verb])
        assert line.endswith(".")
        assert not line.endswith("...")
    assert "best-trial" in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """``--version`` names program and version."""
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"optuna-hermes {__version__}\n"


def test_facts_can_be_had_as_json() -> None:
    """Every verb that prints facts has ``--json``."""
    with_json = {name for name, verb in VERBS.items() if "json" in verb.__annotations__}
    assert with_json == set(VERBS) - {"broker", "plot", "top", "web"}


def test_optunas_verbs_are_those_of_optuna() -> None:
    """The list that spares an import is Optuna's own."""
    assert _optuna.optuna_verbs() == _optuna_verbs.KNOWN


@pytest.mark.parametrize("verb", sorted(_optuna_verbs.KNOWN))
def test_options_may_stand_before_a_verb_of_optuna(verb: str) -> None:
    """Of one word or of two, as for Optuna itself."""
    argv = ("--storage", "sqlite:///s.db", *verb.split(), "--study-name", "digits")
    assert _optuna_verbs.is_for_optuna(argv, VERBS)


@pytest.mark.parametrize(
    ("words", "spared"),
    [
        (["--help"], {"numpy", "sqlalchemy"}),
        (["status"], {"numpy", "psutil", "sqlalchemy"}),
        (["status", *OPTIMIZE[2:]], {"numpy", "psutil", "alembic", "sqlalchemy.orm"}),
    ],
)
def test_light_verbs_import_nothing_heavy(
    words: list[str], spared: set[str], suspended: optuna.Study
) -> None:
    """Help and status start without torch and Optuna, and without what they do not need."""
    code = (
        "import json, sys; from optuna_hermes.cli import run; status = run(sys.argv[1:]); "
        "print(json.dumps(list(sys.modules)), file=sys.stderr); sys.exit(status)"
    )
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, capture_output=True, check=True, timeout=60)
    assert not {"torch", "lightning", "optuna", *spared} & set(json.loads(done.stderr))


# -- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["fly"], "No verb 'fly': see `optuna-hermes --help`."),
        (["hodl"], "No verb 'hodl': did you mean 'hold'? See `optuna-hermes --help`."),
        (["create-stduy"], "did you mean 'create-study'?"),
        (["--fly"], "No such option: --fly"),
        (["optimize"], "See `optuna-hermes optimize --help`"),
        ([*OPTIMIZE, "--fly"], "No such option: --fly"),
        ([*OPTIMIZE, "--n-trials", "0"], "--n-trials"),
        ([*OPTIMIZE, "--n-trials", "many"], "--n-trials"),
        ([*OPTIMIZE, "--slice-seconds", "0"], "--slice-seconds"),
        ([*OPTIMIZE, "--timeout", "-1"], "--timeout"),
        ([*OPTIMIZE, "--seed", "-1"], "--seed"),
        (
            [*OPTIMIZE, "--policy", "magic"],
            "FILE.py:CLASS or module:CLASS, or one of these after energy:, but got 'magic'",
        ),
        ([*OPTIMIZE, "--policy", "energy:magic"], "but got 'magic'"),
        ([*OPTIMIZE, "--power-down-command", "off {device}"], "add --power-up-command"),
        ([*OPTIMIZE, *POWER], "use --policy energy:hermes"),
        (["broker", "--power-up-command", "on {device}"], "add --power-down-command"),
        (["broker", *POWER[:3], "/bin/echo"], "{device} among them"),
        ([*OPTIMIZE, "--devices", "tpu"], "but got 'tpu'"),
        ([*OPTIMIZE, "--devices", "cpu:0"], "between 1 and"),
        (["quickstart", "--devices", "tpu"], "but got 'tpu'"),
        (["broker", "--devices", "tpu"], "but got 'tpu'"),
        (["status", "--study-name", "digits"], "add --storage URL"),
        (["finish", *OPTIMIZE[2:]], "--all"),
        (["finish", *OPTIMIZE[2:], "--all", "3"], "--all"),
        (["finish", *OPTIMIZE[2:], "three"], "TRIAL"),
        (
            ["finish", *OPTIMIZE[2:], "--all"],
            "No file 's.db': check the path in --storage sqlite:///s.db.",
        ),
        (["gc", *OPTIMIZE[2:]], "No file 's.db': check the path in --storage sqlite:///s.db."),
        (["status", *OPTIMIZE[2:]], "No file 's.db': check the path in --storage sqlite:///s.db."),
        *(
            (
                [verb, "--storage", "s.log", "--study-name", "digits"],
                "s.log cannot be used: no such file: make it, empty, for a journal, or give sqlite:///",
            )
            for verb in ("gc", "create-study")
        ),
        *(
            ([*verb.split(), "--storage", url, "--study-name", "digits"], f"but {url} is in memory")
            for verb in ("status", "web", "hold 3", "plot --out p.png")
            for url in ("sqlite://", "sqlite:///:memory:")
        ),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    words: list[str], said: str, refuse: Callable[..., str], here: Path
) -> None:
    """The error is one line, with the value, and nothing is changed."""
    assert said in refuse(*words)
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("storage", ["sqlite://", "sqlite:///:memory:"])
def test_a_storage_in_memory_is_refused(storage: str, runs_with: Any, refuse: Any) -> None:
    """Before a study is made and workers fail, which cannot reach it."""
    runs_with()
    error = refuse(*OPTIMIZE[:2], "--storage", storage, "--study-name", "digits")
    assert f"{storage} is in memory: give --storage sqlite:///study.db" in error


@pytest.mark.parametrize("verb", ["optimize", "status", "top", "trials"])
def test_an_argument_that_python_cannot_decode_is_refused(verb: str, refuse: Any) -> None:
    """As of a name in UTF-8 where the locale is another."""
    error = refuse(verb, "--storage", "sqlite:///s.db", "--study-name", "Gr\udcc3\udcb6")
    assert r"got 'Gr\udcc3\udcb6': set PYTHONUTF8=1" in error


@pytest.mark.parametrize("words", [OPTIMIZE[:2], ("finish", "--all"), ("doctor",)])
@pytest.mark.parametrize(
    ("options", "said"),
    [("", "optuna storage upgrade"), ("?timeout=abc", "string to float: 'abc'")],
)
def test_a_database_that_optuna_does_not_open_is_one_line(
    options: str,
    said: str,
    words: tuple[str, ...],
    runs_with: Callable[..., list[Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its tables may be an older Optuna's, or an option of its URL of the wrong kind."""
    runs_with()
    optuna.create_study(storage="sqlite:///s.db", study_name="digits")
    with contextlib.closing(sqlite3.connect("s.db")) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = 'v2.6.0.a'")
    capsys.readouterr()
    status = run([*words, "--storage", f"sqlite:///s.db{options}", "--study-name", "digits"])
    out, err = capsys.readouterr()
    assert status == (1 if words == ("doctor",) else 2)
    assert said in " ".join((out or err).split())


def test_a_storage_in_a_missing_folder(
    refuse: Callable[..., str], here: Path, runs_with: Callable[..., list[Any]]
) -> None:
    """A database that cannot be made is bad input, and its folder is not made either."""
    runs_with()
    line = refuse(*OPTIMIZE[:3], "sqlite:///no/where.db", *OPTIMIZE[4:])
    assert "sqlite:///no/where.db cannot be reached" in line
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("words", [OPTIMIZE[:2], ("status",), ("top",), ("finish", "--all")])
def test_a_storage_in_a_folder_that_may_not_be_entered(
    words: tuple[str, ...],
    refuse: Callable[..., str],
    runs_with: Callable[..., list[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As for a name that is too long, the system's own words are said."""
    if words == ("top",):
        pytest.importorskip("textual")
    runs_with()
    long = "x" * 300
    line = refuse(*words, "--storage", f"sqlite:///{long}/s.db", "--study-name", "digits")
    assert f"'{long}/s.db' cannot be looked at (File name too long)" in line
    stat = Path.stat

    def closed(file: Path, **how: bool) -> os.stat_result:
        if file.name == "s.db":
            raise PermissionError(errno.EACCES, "Permission denied")
        return stat(file, **how)

    monkeypatch.setattr(Path, "stat", closed)
    line = refuse(*words, "--storage", "sqlite:///away/s.db", "--study-name", "digits")
    assert "'away/s.db' cannot be looked at (Permission denied)" in line


def test_a_database_that_stays_away_is_status_75(
    runs_with: Callable[..., list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It may be back when the same command is run again; it is named without the password."""
    pytest.importorskip("psycopg")
    monkeypatch.setattr(_studies, "START_SECONDS", 0.0)
    called = runs_with()
    url = "postgresql+psycopg://me:sesame@127.0.0.1:1/db"
    assert run([*OPTIMIZE[:3], url, *OPTIMIZE[4:]]) == 75
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert "me:***@127.0.0.1:1/db cannot be reached" in err
    assert "run the same command again" in err
    assert "sesame" not in err
    assert called == []


def test_a_database_that_comes_back_is_waited_for(
    runs_with: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fail-over is waited for, as the study's name is looked for and as the study is made."""
    monkeypatch.setattr(_retry, "FIRST_PAUSE_SECONDS", 0.001)
    get = optuna.storages.get_storage
    away = sqlalchemy.exc.OperationalError("SELECT 1", {}, OSError("connection refused"))
    answers: list[Exception | None] = [away, away, None, away, None]

    def flaky(storage: Any) -> Any:
        # Optuna's own functions give it a storage that is open.
        answer = answers.pop(0) if isinstance(storage, str) else None
        if answer is not None:
            raise answer
        return get(storage)

    monkeypatch.setattr(optuna.storages, "get_storage", flaky)
    called = runs_with()
    assert run(OPTIMIZE) == 0
    assert len(called) == 1
    assert answers == []


def test_an_unknown_study_among_others(
    refuse: Callable[..., str], runs_with: Callable[..., list[Any]]
) -> None:
    """A storage with other studies gets no new one by a typing error; what is there is named."""
    runs_with()
    optuna.create_study(storage="sqlite:///s.db", study_name="faces")
    line = refuse(*OPTIMIZE)
    assert "(there: 'faces')" in line
    assert "`optuna-hermes create-study --storage sqlite:///s.db --study-name digits`" in line
    assert _optuna.study_names("sqlite:///s.db") == ["faces"]


@pytest.mark.parametrize("verb", ["finish", "gc", "status"])
def test_a_study_that_was_never_run_here(verb: str, refuse: Callable[..., str]) -> None:
    """A study of plain Optuna has no ledger, and gets none by looking for it."""
    study = optuna.create_study(storage="sqlite:///s.db", study_name="digits")
    line = refuse(verb, *OPTIMIZE[2:], *(["--all"] if verb == "finish" else []))
    assert "has no ledger" in line
    assert "wait for its first trial if it runs" in line
    assert _optuna.known_key(study) is None


def test_the_study_of_a_refused_command_stays(runs_with: Callable[..., list[Any]]) -> None:
    """Another command may have opened it meanwhile, and imports its objective."""
    runs_with(raises=ObjectiveError("No."))
    assert run(OPTIMIZE) == 2
    assert _optuna.study_names("sqlite:///s.db") == ["digits"]


def test_the_quickstart_names_what_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, refuse: Callable[..., str]
) -> None:
    """Without Lightning and scikit-learn the quickstart says in a line how to install them."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name != "torch" else 1)
    line = refuse("quickstart")
    assert "needs lightning and scikit-learn" in line
    assert "pip install 'optuna-hermes[lightning]'" in line


@pytest.mark.parametrize(("columns", "bars"), [("80", 15), ("30", 7), ("3", 2)])
def test_the_quickstart_ends_with_curves_of_the_best_trials(
    columns: str, bars: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The best first, a line for each, which fits into the terminal; without values no line."""
    monkeypatch.setenv("COLUMNS", columns)
    study = optuna.create_study()
    study.add_trial(optuna.trial.create_trial(state=optuna.trial.TrialState.FAIL))
    for last in range(20, 0, -1):
        values = {epoch: 1.0 + last / (1 + epoch) for epoch in range(15)}
        study.add_trial(optuna.trial.create_trial(value=1.0, intermediate_values=values))
    _quickstart._show_all(study, OptimizeResult(**RESULT), "sqlite:///s.db")
    lines = [each for each in capsys.readouterr().out.splitlines() if each.startswith("  trial ")]
    assert [int(line.split()[1]) for line in lines] == list(range(20, 4, -1))
    assert {line.find("▁ ") for line in lines} == {11 + bars}
    assert lines[-1].endswith("▁  2.067")
    assert max(map(len, lines)) <= max(int(columns), 21)
    _quickstart._show_all(optuna.create_study(), OptimizeResult(**RESULT), "sqlite:///s.db")
    assert "loss" not in capsys.readouterr().out


# -- the end of a run --------------------------------------------------------------------------


def test_optimize_hands_on_what_it_was_told(runs_with: Callable[..., list[Any]]) -> None:
    """Every option reaches the run."""
    (settings,) = _settings(
        runs_with,
        *("--n-trials", "7", "--timeout", "60", "--device-seconds", "30", "--devices", "cpu:3"),
        *("--policy", "fifo", "--slice-seconds", "0.25", "--seed", "5", "--checkpoint-dir", "c"),
    )
    assert settings == OptimizeSettings(
        n_trials=7,
        timeout=60.0,
        device_seconds=30.0,
        devices="cpu:3",
        policy="fifo",
        slice_seconds=0.25,
        seed=5,
        checkpoint_dir="c",
    )


def _settings(runs_with: Callable[..., list[Any]], *options: str) -> list[Any]:
    called = runs_with()
    assert run([*OPTIMIZE, *options]) == 0
    return called


def test_power_commands_are_handed_on(runs_with: Callable[..., list[Any]]) -> None:
    """As words, with a policy that has a use for them, any policy behind it."""
    (settings,) = _settings(runs_with, "--policy", "energy:fifo", *POWER)
    echo = ("/bin/echo", "{device}")
    assert (settings.policy, settings.power) == ("energy:fifo", PowerCommands(down=echo, up=echo))


def test_help_names_energy(capsys: pytest.CaptureFixture[str]) -> None:
    """The policy and its commands are in the help of `optimize`."""
    assert run(["optimize", "--help"]) == 0
    shown = capsys.readouterr().out
    for word in ("energy:hermes", "--power-down-command", "--power-up-command"):
        assert word in shown


def test_json_is_one_document_and_nothing_else(
    runs_with: Callable[..., list[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """With ``--json`` standard output is the result document; notes go to standard error."""
    runs_with(trials=(STORED,), best={"number": 1, "value": float("inf"), "params": {}})
    assert run([*OPTIMIZE, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document.keys() == RESULT.keys() | {"watt_hours", "failure"}
    assert document["watt_hours"] is None
    assert document["failure"] is None
    assert document["trials"][0]["state"] == "STORED"
    assert document["best"]["value"] is None


def test_suspended_trials_are_named_with_the_way_on(
    runs_with: Callable[..., list[Any]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a timeout the number of suspended trials and the same command line are shown."""
    words = [*OPTIMIZE[:-1], "my digits", "--timeout", "5"]
    monkeypatch.setattr(sys, "argv", ["/somewhere/optuna-hermes", *words])
    runs_with(trials=(STORED,))
    assert run(words) == 0
    err = capsys.readouterr().err
    assert "Stopped with 1 trial suspended" in err
    assert (
        "  optuna-hermes optimize x.py:f --storage sqlite:///s.db --study-name 'my digits'" in err
    )


def test_ctrl_c_is_status_130(
    runs_with: Callable[..., list[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """After Ctrl-C the way on is shown, and the status is the one shells know."""
    runs_with(interrupted=True)
    assert run(OPTIMIZE) == 130
    assert "To go on:" in capsys.readouterr().err


def test_ctrl_c_once_all_trials_are_over(
    runs_with: Callable[..., list[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """There is nothing to go on with, unless the study shall have more trials."""
    runs_with(interrupted=True, stopped=True, trials=(replace(STORED, state="FAIL"),))
    assert run([*OPTIMIZE, "--n-trials", "1"]) == 130
    assert capsys.readouterr().err.endswith("were over before they could be suspended.\n")
    assert run([*OPTIMIZE, "--n-trials", "2"]) == 130
    assert "To go on:" in capsys.readouterr().err


def test_ctrl_c_before_anything_runs_is_status_130(
    runs_with: Callable[..., list[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C at any other moment gives the same status, and no traceback."""
    runs_with(raises=KeyboardInterrupt())
    assert run(OPTIMIZE) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_a_problem_is_bad_input(
    runs_with: Callable[..., list[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that ends with a problem, as a checkpoint that cannot be read, has status 2."""
    runs_with(problem="Checkpoint x of trial 3 cannot be read.")
    assert run(OPTIMIZE) == 2
    assert capsys.readouterr().err.endswith("error: Checkpoint x of trial 3 cannot be read.\n")


def test_a_problem_that_may_pass_is_for_later(
    runs_with: Callable[..., list[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Managers run the command again, here or on another host: status 75."""
    runs_with(problem="No checkpoint could be read on this host.", problem_may_pass=True)
    assert run(OPTIMIZE) == 75
    assert capsys.readouterr().err.endswith("error: No checkpoint could be read on this host.\n")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidInputError("a\nb"), 2),
        (BrokerError("The broker is gone."), 1),
        (DatabaseOutageError("The database is away."), 75),
    ],
)
def test_expected_errors_are_one_line(
    error: Exception,
    status: int,
    runs_with: Callable[..., list[Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Errors of this package end in one line: 2 for bad input, 1 for what broke, 75 for later."""
    optuna.create_study(storage="sqlite:///s.db", study_name="digits")
    capsys.readouterr()
    runs_with(raises=error)
    assert run(OPTIMIZE) == status
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


# -- a reader that is gone ---------------------------------------------------------------------

QUICKSTART = ("quickstart", "--devices", "cpu:1", "--storage", "sqlite:///q.db")


@contextlib.contextmanager
def unread() -> Iterator[TextIO]:
    """A pipe whose reader is gone; closing it flushes it, as the end of a process does."""
    ours, theirs = os.pipe()
    os.close(ours)
    with os.fdopen(theirs, "w") as closed:
        yield closed


@pytest.mark.parametrize("words", [OPTIMIZE, (*OPTIMIZE, "--json"), QUICKSTART])
@pytest.mark.parametrize("streams", [["stdout"], ["stdout", "stderr"]])
@pytest.mark.parametrize(
    ("ended", "status"),
    [({"stopped": True, "interrupted": True, "trials": (STORED,)}, 130), ({}, 0)],
)
def test_a_reader_that_is_gone_does_not_change_the_status(
    words: tuple[str, ...],
    streams: list[str],
    ended: dict[str, Any],
    status: int,
    runs_with: Callable[..., list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ctrl-C ends the ``tee`` behind a pipe too; nothing is left that the end would flush."""
    monkeypatch.setattr(_quickstart, "_require_packages", lambda: None)
    runs_with(**ended)
    with contextlib.ExitStack() as pipes, monkeypatch.context() as patch:
        for stream in streams:
            patch.setattr(sys, stream, pipes.enter_context(unread()))
        assert run(words) == status
    if status and "stderr" not in streams:
        assert "To go on:" in capsys.readouterr().err


def test_the_job_is_requeued_without_a_reader(
    runs_with: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request to SLURM does not depend on who reads the result."""
    asked: list[str] = []
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setattr("optuna_hermes.cli._optimize.ask_for_requeue", asked.append)
    runs_with(stopped=True, suspended=True, trials=(STORED,))
    with unread() as out, unread() as err, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        assert run([*OPTIMIZE, "--requeue"]) == 75
    assert asked == ["17"]


def test_the_job_is_requeued_after_an_outage(
    runs_with: Callable[..., list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its status is that of a suspended study; the reason is said before SLURM ends the job."""
    asked: list[str] = []
    optuna.create_study(storage="sqlite:///s.db", study_name="digits")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setattr("optuna_hermes.cli._optimize.ask_for_requeue", asked.append)
    runs_with(raises=DatabaseOutageError("The database is away."))
    assert run(OPTIMIZE) == 75
    assert asked == []
    capsys.readouterr()
    assert run([*OPTIMIZE, "--requeue"]) == 75
    assert asked == ["17"]
    said = capsys.readouterr().err
    assert said == "error: The database is away.\nAsking SLURM to begin job 17 again.\n"


def test_progress_that_nobody_reads_does_not_change_the_status(
    runs_with: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The display ends with its first error, and what it could not write is forgotten."""
    optuna.create_study(storage="sqlite:///s.db", study_name="digits")
    runs_with()

    def run_study(
        study: Any, pool: Any, settings: OptimizeSettings, progress: Any
    ) -> OptimizeResult:
        progress.note("1 of 8 done")
        return OptimizeResult(**RESULT)

    monkeypatch.setattr(_optimize, "run_study", run_study)
    with unread() as closed, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", closed)
        assert run(OPTIMIZE) == 0


@pytest.mark.parametrize(("ended", "status"), [({}, 1), ({"interrupted": True}, 130)])
def test_a_result_without_room_is_no_success(
    ended: dict[str, Any],
    status: int,
    runs_with: Callable[..., list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is said that the file is not whole; a status that asks for more counts for more."""
    runs_with(**ended)
    with open("/dev/full", "w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        assert run([*OPTIMIZE, "--json"]) == status
    assert "error: The result cannot be printed (No space left" in capsys.readouterr().err


# -- status, finish, gc, broker ----------------------------------------------------------------


def test_status_without_a_broker(capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody at work is a fact, not an error."""
    assert run(["status"]) == 0
    assert "No broker runs on this host" in capsys.readouterr().out
    assert run(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "broker": None,
        "silent": False,
        "study": None,
    }


@pytest.fixture
def suspended(here: Path) -> optuna.Study:
    """A study with trial 0 COMPLETE and trial 1 suspended, made without any broker."""
    from optuna_hermes.ledger import TrialRecord, open_ledger

    study = optuna.create_study(storage="sqlite:///s.db", study_name="digits")
    key = _optuna.study_key(study)
    study.tell(study.ask(), 3.0)
    trial = _optuna.open_trial(study)
    trial.report(2.0, 1)
    run_ = TrialRecord(study=key, number=1, trial_id=_optuna.trial_id(trial), state="running")
    ledger = open_ledger(_optuna.ledger_url(study))
    ledger.save_trial(run_)
    ledger.close()
    return study


@pytest.fixture
def in_journal(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[optuna.Study, tuple[str, ...]]:
    """A study in a journal's file with trial 0 suspended, and the words that name it."""
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    from optuna_hermes.ledger import TrialRecord, open_ledger

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    storage = JournalStorage(JournalFileBackend(str(here / "journal.log")))
    study = optuna.create_study(storage=storage, study_name="digits")
    _optuna.claim_ledger(study)
    trial = _optuna.open_trial(study)
    trial.report(2.0, 1)
    row = TrialRecord(
        study=_optuna.study_key(study), number=0, trial_id=_optuna.trial_id(trial), state="stored"
    )
    with contextlib.closing(open_ledger(_optuna.ledger_url(study))) as ledger:
        ledger.save_trial(row)
    return study, ("--storage", "journal.log", "--study-name", "digits")


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_every_verb_opens_a_journal(
    in_journal: tuple[optuna.Study, tuple[str, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    """As Optuna's own verbs do: else nobody could close its suspended trials, nor clear it away."""
    study, words = in_journal
    for verb in (["status"], ["status", "0"], ["hold", "0"], ["release", "0"], ["gc"], ["trials"]):
        assert run([*verb, *words]) == 0, capsys.readouterr().err
    capsys.readouterr()
    assert run(["doctor", *words, "--json"]) in (0, 1)  # of this host's other checks
    checks = {each["name"]: each for each in json.loads(capsys.readouterr().out)["checks"]}
    assert [checks[name]["state"] for name in ("studies", "ledger", "study 'digits'")] == ["ok"] * 3
    assert run(["finish", *words, "0"]) == 0
    assert study.trials[0].value == 2.0


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_an_event_log_takes_one_read_of_a_journals_trials(
    in_journal: tuple[optuna.Study, tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is one of all trials, and a proxy sends them."""
    reads, get_trials = [], optuna.Study.get_trials

    def counted(study: optuna.Study, *arguments: Any, **named: Any) -> Any:
        reads.append(study)
        return get_trials(study, *arguments, **named)

    monkeypatch.setattr(optuna.Study, "get_trials", counted)
    assert run(["status", "0", *in_journal[1]]) == 0
    assert len(reads) == 1


def test_optimize_opens_a_journal(
    in_journal: tuple[optuna.Study, tuple[str, ...]], runs_with: Callable[..., list[Any]]
) -> None:
    """With ``--ledger``, which is for studies that are in no database."""
    called = runs_with()
    _, words = in_journal
    ledger = "postgresql+psycopg://user@db/hermes"
    assert run(["optimize", "x.py:f", *words, "--ledger", ledger]) == 0
    assert called[0].ledger == ledger


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_a_journal_in_redis_is_opened(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its URL, as Optuna's own command line does."""
    fakeredis = pytest.importorskip("fakeredis")
    server = fakeredis.FakeStrictRedis()
    monkeypatch.setattr("redis.Redis.from_url", lambda *_, **__: server)
    _, is_new = _optuna.create_study("redis://host/0", "digits")
    assert is_new
    assert run(["study-names", "--storage", "redis://host/0"]) == 0
    assert capsys.readouterr().out == "digits\n"


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_a_proxy_that_is_not_there(
    refuse: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line names it."""
    pytest.importorskip("grpc")
    monkeypatch.setattr(_storages, "_PROXY_SECONDS", 0.1)
    words = ("--storage", "grpc://127.0.0.1:1", "--study-name", "digits")
    line = refuse("finish", *words, "--all")
    assert "grpc://127.0.0.1:1 cannot be used: no proxy answers there" in line
    assert "no proxy answers there" in refuse("best-trial", *words)
    line = refuse("finish", "--storage", "grpc://localhost", "--study-name", "digits", "--all")
    assert "cannot be used: name its host and port, as in grpc://localhost:13000." in line


def test_status_of_a_study_from_its_ledger(
    suspended: optuna.Study, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a broker no run is running, whatever the ledger was told last."""
    assert run(["status", *OPTIMIZE[2:], "--json"]) == 0
    document = json.loads(capsys.readouterr().out)["study"]
    assert document["counts"] == {"pending": 1}
    assert [entry["trial"] for entry in document["trials"]] == [1]
    assert document["others"] == {"done": 1}
    assert run(["status", *OPTIMIZE[2:]]) == 0
    assert "device of this package: 1 done; see" in capsys.readouterr().out


def test_status_of_a_study_that_maximises(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Values are shown as their user knows them, and the best is the highest ever reported."""
    from optuna_hermes.ledger import ReportRecord, TrialRecord, open_ledger

    study = optuna.create_study(storage="sqlite:///s.db", study_name="digits", direction="maximize")
    key = _optuna.study_key(study)
    ledger = open_ledger(_optuna.ledger_url(study))
    reported = {0: (0.5,), 1: (0.9, 0.4), 2: (float("nan"),), 3: (0.95,)}
    for number, values in reported.items():
        state: Any = "failed" if number == 3 else "stored"
        ledger.save_trial(TrialRecord(study=key, number=number, trial_id=number, state=state))
        of = {"study": key, "number": number, "device_seconds": 1.0, "at": 0.0}
        for unit, value in enumerate(values, 1):
            ledger.add_report(ReportRecord(**of, unit=unit, step=unit, value=-value))
    ledger.close()
    assert run(["status", *OPTIMIZE[2:], "--json"]) == 0
    document = json.loads(capsys.readouterr().out)["study"]
    assert document["best"] == {"trial": 1, "value": 0.9}
    assert [entry["value"] for entry in document["trials"]] == [0.5, 0.4, None, 0.95]


def test_finish_by_number(suspended: optuna.Study, capsys: pytest.CaptureFixture[str]) -> None:
    """A suspended trial is told COMPLETE at its last value, and the verb says so."""
    assert run(["finish", *OPTIMIZE[2:], "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"finished": {"1": 2.0}, "refused": {}}
    assert suspended.trials[1].value == 2.0


def test_finish_changes_nothing_if_one_is_refused(
    suspended: optuna.Study, refuse: Callable[..., str]
) -> None:
    """Named trials are finished all together or not at all."""
    assert "trial 0: not suspended but COMPLETE" in refuse("finish", *OPTIMIZE[2:], "0", "1")
    assert not suspended.trials[1].state.is_finished()


def test_finish_all_says_what_it_left(
    suspended: optuna.Study, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--all`` finishes what has reported and names the rest."""
    for _ in range(2):
        _optuna.open_trial(suspended)
    assert run(["finish", *OPTIMIZE[2:], "--all"]) == 0
    out, err = capsys.readouterr()
    assert out == "Finished 1 trial: 1.\n"
    assert "trials 2, 3: nothing was reported" in err


def test_finish_all_leaves_what_waits_for_another_host(
    suspended: optuna.Study, refuse: Callable[..., str]
) -> None:
    """It may go on at any moment where that trains; one that is named is finished."""
    from optuna_hermes.ledger import HostRecord, TrialRecord, open_ledger

    number = _optuna.open_trial(suspended).number
    with contextlib.closing(open_ledger(_optuna.ledger_url(suspended))) as ledger:
        ledger.beat(HostRecord(name="b", instance="b1"))
        of = {"study": _optuna.study_key(suspended), "number": number, "trial_id": number + 1}
        ledger.save_trial(TrialRecord(**of, state="running", owner="b1"), by="b1")
    assert "trials 1, 2: held by a live process" in refuse("finish", *OPTIMIZE[2:], "--all")
    assert run(["finish", *OPTIMIZE[2:], "1"]) == 0
    assert suspended.trials[1].value == 2.0


@pytest.mark.parametrize("place", [[], ["--checkpoint-dir", "fast"]])
def test_finish_looks_for_late_values_where_checkpoints_were_to_be(
    place: list[str], suspended: optuna.Study, here: Path
) -> None:
    """The database was away: it has neither the last value nor the checkpoint's place."""
    root = _optuna.checkpoint_root(suspended, here / "fast" if place else None)
    folder = root / _optuna.trial_folder(1)
    folder.mkdir(parents=True)
    _journal.change(folder, unwritten=((2, 1.5),))
    assert run(["finish", *OPTIMIZE[2:], "--all", *place]) == 0
    assert suspended.trials[1].value == 1.5
    assert _journal.find(folder) == _journal.Journal()


def test_finish_takes_the_url_of_checkpoints_too(suspended: optuna.Study) -> None:
    """As `gc` does: late values of trials that are saved there lie in the default folder."""
    folder = _optuna.checkpoint_root(suspended) / _optuna.trial_folder(1)
    folder.mkdir(parents=True)
    _journal.change(folder, unwritten=((2, 1.5),))
    assert run(["finish", *OPTIMIZE[2:], "1", "--checkpoint-dir", "s3://bucket/a"]) == 0
    assert suspended.trials[1].value == 1.5


@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_finish_and_gc_look_where_a_study_s_own_folder_cannot_be_written(
    mode: int, suspended: optuna.Study, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What goes to a store then lies in the user's temporary folder, unless others can enter it."""
    monkeypatch.setattr(tempfile, "tempdir", str(here))
    folder = _optuna.checkpoint_root(suspended, copies_folder()) / _optuna.trial_folder(1)
    folder.mkdir(parents=True)
    copies_folder().chmod(mode)
    _journal.change(folder, unwritten=((2, 1.5),))
    kept = folder / "000001-unit-1.safetensors"
    kept.touch()
    private = mode == 0o700
    assert run(["finish", *OPTIMIZE[2:], "1", "--checkpoint-dir", "s3://bucket/a"]) == 0
    assert suspended.trials[1].value == (1.5 if private else 2.0)
    assert run(["gc", *OPTIMIZE[2:]]) == 0
    assert kept.exists() is not private


def test_finish_leaves_a_trial_that_trains_until_it_has_stopped(
    suspended: optuna.Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process writes its late values itself, and the next ones into the same journal."""
    folder = _optuna.checkpoint_root(suspended) / _optuna.trial_folder(1)
    folder.mkdir(parents=True)
    _journal.change(folder, unwritten=((2, 1.5),))
    seen: list[Any] = []

    def stop(study: Any, ledger: Any, numbers: Any, folders: Any = ()) -> Any:
        seen.extend([list(numbers), suspended.trials[1].intermediate_values])
        seen.append(_journal.find(folder).unwritten)
        return {1: 1.5}, {}

    served = broker_status(study_status(key=_optuna.study_key(suspended)))
    monkeypatch.setattr("optuna_hermes.cli._upkeep.broker_status", lambda: served)
    monkeypatch.setattr(upkeep, "held_trials", lambda *_, **__: frozenset({1}))
    monkeypatch.setattr(upkeep, "finish_live", stop)
    assert run(["finish", *OPTIMIZE[2:], "1"]) == 0
    assert seen == [[1], {1: 2.0}, ((2, 1.5),)]


def test_finish_names_live_trials_that_it_could_not_finish(
    suspended: optuna.Study,
    refuse: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Status 2, although others are finished; if none is, it is an error."""
    trial = _optuna.open_trial(suspended)
    trial.report(3.0, 1)
    lives: list[Any] = [({1: 2.0}, {2: "it is late"})] * 2 + [({}, {1: "nan", 2: "nan"})]
    served = broker_status(study_status(key=_optuna.study_key(suspended)))
    monkeypatch.setattr("optuna_hermes.cli._upkeep.broker_status", lambda: served)
    monkeypatch.setattr(upkeep, "held_trials", lambda *_, **__: frozenset({1, 2}))
    monkeypatch.setattr(upkeep, "finish_live", lambda *_: lives.pop(0))
    words = ("finish", *OPTIMIZE[2:], "1", "2")
    assert run(words) == 2
    shown = capsys.readouterr()
    assert shown.out == "Finished 1 trial: 1.\n"
    assert shown.err == "Left as they are: trial 2: it is late.\n"
    assert run([*words, "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert document == {"finished": {"1": 2.0}, "refused": {"2": "it is late"}}
    assert "Nothing was finished: trials 1, 2: nan." in refuse(*words)


def test_finish_says_what_is_wrong_with_a_trial_of_ones_own_broker(
    suspended: optuna.Study, refuse: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has reported nothing: to stop its `optimize` would not help."""
    _optuna.open_trial(suspended)
    monkeypatch.setattr(upkeep, "held_trials", lambda *_, **__: frozenset({1, 2}))
    words = ("finish", *OPTIMIZE[2:], "1", "2")
    assert "trials 1, 2: held by a live process" in refuse(*words)
    key = _optuna.study_key(suspended)
    served = broker_status(study_status(key=key))
    monkeypatch.setattr("optuna_hermes.cli._upkeep.broker_status", lambda: served)
    line = refuse(*words)
    assert "trial 2: nothing was reported" in line
    assert "held" not in line


def test_a_trial_that_ends_as_it_is_finished_is_refused(
    suspended: optuna.Study, refuse: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line: that a late value could not be written is no error of its own."""
    folder = _optuna.checkpoint_root(suspended) / _optuna.trial_folder(1)
    folder.mkdir(parents=True)
    _journal.change(folder, unwritten=((2, 1.5),))
    write = _optuna.write_value

    def end_first(*arguments: Any) -> None:
        suspended.tell(1, 2.0)
        write(*arguments)

    monkeypatch.setattr(_optuna, "write_value", end_first)
    assert "error: Trial 1 cannot be finished: " in refuse("finish", *OPTIMIZE[2:], "1")
    assert suspended.trials[1].value == 2.0


def test_gc_says_what_it_freed(suspended: optuna.Study, capsys: pytest.CaptureFixture[str]) -> None:
    """A dry run removes nothing; the same without it removes what was announced."""
    path = _optuna.checkpoint_root(suspended) / "trial-00000" / "000001-unit-1.safetensors"
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(2048))
    assert run(["gc", *OPTIMIZE[2:], "--dry-run"]) == 0
    assert path.exists()
    assert run(["gc", *OPTIMIZE[2:]]) == 0
    assert not path.exists()
    assert capsys.readouterr().out == ("Would remove 1 file, 2.0 KiB.\nRemoved 1 file, 2.0 KiB.\n")


@pytest.mark.parametrize("call", ["unlink", "stat"])
def test_gc_says_what_it_may_not_remove(
    call: str,
    suspended: optuna.Study,
    refuse: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of another user, or on a disk that is read-only: in a line, and its row stays."""
    from optuna_hermes.ledger import CheckpointRecord, open_ledger

    path = _optuna.checkpoint_root(suspended) / "trial-00000" / "000001-unit-1.safetensors"
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(2048))
    key = _optuna.study_key(suspended)
    checkpoint = Checkpoint(path=str(path), units=1, size_bytes=2048, sha256="")
    do = getattr(Path, call)

    def denied(self: Path, **options: Any) -> Any:
        if self == path:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return do(self, **options)

    with contextlib.closing(open_ledger(_optuna.ledger_url(suspended))) as ledger:
        ledger.save_checkpoint(CheckpointRecord(study=key, number=0, checkpoint=checkpoint, at=0.0))
        with monkeypatch.context() as patch:
            patch.setattr(Path, call, denied)
            line = refuse("gc", *OPTIMIZE[2:])
        assert f"{str(path)!r} cannot be cleared away (Permission denied)" in line
        assert path.exists()
        assert len(ledger.load_checkpoints(key)) == 1
        assert run(["gc", *OPTIMIZE[2:]]) == 0
        assert not path.exists()
        assert ledger.load_checkpoints(key) == []


def test_gc_names_the_folders_it_did_not_look_in(
    suspended: optuna.Study, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checkpoints that were given another folder are kept, and how to reach them is said."""
    from optuna_hermes.ledger import CheckpointRecord, open_ledger

    root = _optuna.checkpoint_root(suspended, tmp_path / "fast")
    path = root / "trial-00000" / "000001-unit-1.safetensors"
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(2048))
    ledger = open_ledger(_optuna.ledger_url(suspended))
    ledger.save_checkpoint(
        CheckpointRecord(
            study=_optuna.study_key(suspended),
            number=0,
            checkpoint=Checkpoint(path=str(path), units=1, size_bytes=2048, sha256=""),
            at=0.0,
        )
    )
    assert run(["gc", *OPTIMIZE[2:]]) == 0
    out, err = capsys.readouterr()
    assert out == "Removed 0 files, 0 B.\n"
    folder = str(tmp_path / "fast")
    words = f"The ledger names checkpoints in {folder!r} too: say --checkpoint-dir for those.\n"
    assert err == words
    assert gc_json(capsys)["elsewhere"] == [folder]
    assert path.exists()
    assert run(["gc", *OPTIMIZE[2:], "--checkpoint-dir", folder]) == 0
    out, err = capsys.readouterr()
    assert out == "Removed 1 file, 2.0 KiB.\n"
    assert err == ""
    assert ledger.load_checkpoints(_optuna.study_key(suspended)) == []
    ledger.close()


def test_gc_says_how_a_study_is_forgotten_whose_folder_is_gone(
    suspended: optuna.Study, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder that is not there may be another host's: only its user knows that it is gone."""
    from optuna_hermes.ledger import CheckpointRecord, TrialRecord, open_ledger

    folder = here / "far"
    path = str(folder / "deleted" / "trial-00000" / "000001-unit-1.safetensors")
    checkpoint = Checkpoint(path=path, units=1, size_bytes=2048, sha256="")
    with contextlib.closing(open_ledger(_optuna.ledger_url(suspended))) as ledger:
        ledger.save_trial(TrialRecord(study="deleted", number=0, trial_id=9, state="stored"))
        ledger.save_checkpoint(
            CheckpointRecord(study="deleted", number=0, checkpoint=checkpoint, at=0.0)
        )
    for words in ([], ["--checkpoint-dir", str(folder)]):
        assert run(["gc", *OPTIMIZE[2:], *words]) == 0
        out, err = capsys.readouterr()
        assert out == "Removed 0 files, 0 B.\n"
        assert err == (
            f"The ledger names checkpoints in {str(folder)!r} too, which is no folder of this "
            "host: say `gc --checkpoint-dir` where it is, or make it, empty, if it is gone for "
            "good.\n"
        )
    folder.mkdir()
    assert run(["gc", *OPTIMIZE[2:], "--checkpoint-dir", str(folder)]) == 0
    out, err = capsys.readouterr()
    assert out == "Removed 0 files, 0 B.\nCleared from the ledger: 1 deleted study.\n"
    assert err == ""


def test_gc_takes_a_home_folder_as_optimize_does(
    suspended: optuna.Study, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell leaves ``~`` as it is in --checkpoint-dir=~/fast."""
    monkeypatch.setenv("HOME", str(here))
    path = (
        _optuna.checkpoint_root(suspended, here / "fast")
        / "trial-00000"
        / "000001-unit-1.safetensors"
    )
    path.parent.mkdir(parents=True)
    path.touch()
    assert run(["gc", *OPTIMIZE[2:], "--checkpoint-dir=~/fast"]) == 0
    assert not path.exists()


def gc_json(capsys: pytest.CaptureFixture[str]) -> Any:
    assert run(["gc", *OPTIMIZE[2:], "--dry-run", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_gc_clears_the_ledger_too(
    suspended: optuna.Study,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A lease of a broker that is dead is announced, and ended; not while trials may come back."""
    from optuna_hermes.broker import _holders as holders
    from optuna_hermes.ledger import LeaseRecord, open_ledger

    key, host = _optuna.study_key(suspended), socket.gethostname()
    ledger = open_ledger(_optuna.ledger_url(suspended))
    ledger.commit_lease(
        LeaseRecord(study=key, epoch=1, number=1, devices=("d",), host=host, started=0.0)
    )
    assert gc_json(capsys)["leases"] == [1]
    with monkeypatch.context() as patch:
        patch.setattr(holders, "living", lambda directory: ("a process",))
        assert gc_json(capsys)["leases"] == []
    assert run(["gc", *OPTIMIZE[2:]]) == 0
    assert capsys.readouterr().out == (
        "Removed 0 files, 0 B.\nCleared from the ledger: 1 orphaned lease.\n"
    )
    assert ledger.load_leases()[0].ended is not None
    ledger.close()


def test_stopping_no_broker_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    """``broker --stop`` without a broker has nothing to do."""
    assert run(["broker", "--stop"]) == 0
    assert capsys.readouterr().err == "No broker runs on this host.\n"


def test_json_has_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    """NaN and infinity become null, at any depth."""
    show_json({"a": [float("nan"), (1.0, float("inf"))]})
    assert json.loads(capsys.readouterr().out) == {"a": [None, [1.0, None]]}
