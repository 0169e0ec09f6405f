"""Invalid numbers, databases and names give one line and exit status 2, and change nothing."""

from __future__ import annotations

import functools
import math
import sqlite3
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import optuna
import pytest

from optuna_hermes import HermesSampler, _optuna, optimize
from optuna_hermes.cli import run
from optuna_hermes.errors import InvalidInputError
from optuna_hermes.ledger import open_ledger

OPTIMIZE = ("optimize", "objective.py:objective", "--study-name", "s", "--devices", "cpu:1")

Made = Callable[[Path], None]


@functools.cache
def _database(fill: Callable[[str], None]) -> bytes:
    """The file of a database that is filled once, for tests that each have a copy."""
    with tempfile.TemporaryDirectory() as folder:
        fill(f"sqlite:///{folder}/study.db")
        return Path(folder, "study.db").read_bytes()


def _copy(fill: Callable[[str], None], storage_url: str) -> None:
    Path(storage_url.removeprefix("sqlite:///")).write_bytes(_database(fill))


def _refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line of a command that ends with exit status 2."""
    assert run(argv) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    return said


@pytest.mark.parametrize("value", ["inf", "nan", "-1", "-inf", "1e400", "x", ""])
@pytest.mark.parametrize(
    "words",
    [
        (*OPTIMIZE, "--timeout"),
        (*OPTIMIZE, "--device-seconds"),
        (*OPTIMIZE, "--slice-seconds"),
        (*OPTIMIZE, "--grace"),
        ("broker", "--idle-seconds"),
        ("simulate", "none.npz", "--switch-cost"),
    ],
    ids=lambda words: words[-1],
)
def test_seconds_are_finite(
    capsys: pytest.CaptureFixture[str], storage_url: str, words: tuple[str, ...], value: str
) -> None:
    """Neither infinite nor NaN nor negative, whatever the spelling."""
    storage = ("--storage", storage_url) if words[0] == "optimize" else ()
    assert words[-1] in _refused(capsys, *words, value, *storage)


@pytest.mark.parametrize("value", ["-1", "1.5", "nan", "1" + "0" * 30, "9" * 5000])
@pytest.mark.parametrize("option", ["--n-trials", "--seed"])
def test_counts_are_numbers_that_a_database_can_keep(
    capsys: pytest.CaptureFixture[str], storage_url: str, option: str, value: str
) -> None:
    """Neither negative nor broken nor huge."""
    assert option in _refused(capsys, *OPTIMIZE, "--storage", storage_url, option, value)


def _with_a_ledger(url: str) -> None:
    study = optuna.create_study(storage=url, study_name="s")
    open_ledger(_optuna.ledger_url(study)).close()
    assert _optuna.study_key(study)


@pytest.mark.parametrize("verb", ["hold", "boost", "release", "finish", "status"])
@pytest.mark.parametrize("number", ["99999999999999999999", "9" * 5000], ids=len)
def test_a_trial_of_many_digits_is_refused(
    capsys: pytest.CaptureFixture[str], storage_url: str, verb: str, number: str
) -> None:
    """Also one that no database can look up."""
    _copy(_with_a_ledger, storage_url)
    _refused(capsys, verb, number, "--storage", storage_url, "--study-name", "s")


@pytest.mark.parametrize("value", [math.inf, math.nan, -1.0])
def test_seconds_are_finite_in_python_too(value: float) -> None:
    """Seconds that no clock reaches, or all have passed, are refused before anything begins."""
    study = optuna.create_study()
    for name in ("timeout", "device_seconds", "slice_seconds"):
        with pytest.raises(InvalidInputError, match=f"{name} must be a finite number"):
            optimize(study, abs, **{name: value})  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="slice_seconds must be a finite number"):
        HermesSampler(slice_seconds=value)


def test_a_number_of_devices_is_refused() -> None:
    """It is what a Trainer takes; here it could mean GPUs as well as CPU slots."""
    with pytest.raises(InvalidInputError, match=r'such as "auto", .* but got 2\.'):
        optimize(optuna.create_study(), abs, devices=2)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="devices must be a text"):
        HermesSampler(devices=2)  # type: ignore[arg-type]


def test_a_store_without_its_package_or_with_a_password_is_refused(
    capsys: pytest.CaptureFixture[str], storage_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package is named, and the password is not."""
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    words = (*OPTIMIZE, "--storage", storage_url, "--checkpoint-dir")
    assert "pip install 'optuna-hermes[remote]'" in _refused(capsys, *words, "gs://bucket/runs")
    said = _refused(capsys, *words, "ftp://ann:s3cret@host/runs")
    assert "must hold no password" in said
    assert "s3cret" not in said
    with pytest.raises(InvalidInputError, match="seen by other processes"):
        optimize(optuna.create_study(), abs, checkpoint_dir="memory://x")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("sqlite:///l.db", "ledger must be the URL of a PostgreSQL or MySQL database"),
        ("s3://bucket", "ledger must be the URL of a PostgreSQL or MySQL database"),
        ("postgresql://ann:s3cret@db/optuna", "ledger must hold no password"),
    ],
)
def test_a_ledger_is_a_database_without_a_password(
    url: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, storage_url: str
) -> None:
    """One line says so, and the password is not in it."""
    text = _refused(capsys, *OPTIMIZE, "--storage", storage_url, "--ledger", url)
    assert said in text
    assert "s3cret" not in text


def test_the_ledger_of_a_study_in_a_database_is_there(storage_url: str) -> None:
    """Another one cannot be named for it."""
    study = optuna.create_study(storage=storage_url, study_name="s")
    with pytest.raises(InvalidInputError, match="ledger must be left out for study 's', whose"):
        _optuna.claim_ledger(study, "postgresql+psycopg://ann@db/optuna")
    _optuna.claim_ledger(study)
    assert "hermes:ledger" not in study.user_attrs


def _text(path: Path) -> None:
    path.write_text("not a database, but a text of some length\n" * 100)


def _folder(path: Path) -> None:
    path.mkdir()


def _of_many_pages(url: str) -> None:
    study = optuna.create_study(storage=url, study_name="s")
    for x in range(200):
        study.add_trial(optuna.trial.create_trial(value=float(x), user_attrs={"note": "x" * 500}))


def _damaged(path: Path) -> None:
    """A study whose pages are overwritten, but for the first ones."""
    data = bytearray(_database(_of_many_pages))
    data[4096 * 4 :] = b"\xa5" * (len(data) - 4096 * 4)
    path.write_bytes(data)


def _cut(path: Path) -> None:
    """A study whose file ends in the middle."""
    _damaged(path)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


@pytest.mark.parametrize("make", [_text, _folder, _damaged, _cut])
@pytest.mark.parametrize(
    "words",
    [
        (*OPTIMIZE, "--n-trials", "1"),
        ("status", "--study-name", "s"),
        ("gc", "--study-name", "s"),
        ("hold", "0", "--study-name", "s"),
        ("plot", "--study-name", "s", "--out", "plots.html"),
        ("trials", "--study-name", "s"),
        ("best-trial", "--study-name", "s"),
        ("studies",),
        ("create-study", "--study-name", "t"),
    ],
    ids=lambda words: words[0],
)
def test_a_file_that_is_no_whole_database_is_one_line(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    make: Made,
) -> None:
    """A text, a folder, pages that are overwritten or missing: no traceback, and exit status 2."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "objective.py").write_text("def objective(trial): return 0.0\n")
    path = tmp_path / "study.db"
    make(path)
    _refused(capsys, *words, "--storage", f"sqlite:///{path}")


@pytest.mark.parametrize(
    "words",
    [
        (*OPTIMIZE, "--n-trials", "1"),
        ("status", "--study-name", "s"),
        ("create-study", "--study-name", "t"),
        ("studies",),
    ],
    ids=lambda words: words[0],
)
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: _copy(_with_a_ledger, f"sqlite:///{path}"), "give sqlite:///study.db"),
        (lambda path: path.write_text("postgresql://host/db"), "no journal"),
        (lambda path: path.write_text("postgresql://host/db\n"), "no journal"),
    ],
    ids=["sqlite", "text", "line"],
)
def test_a_file_that_is_no_journal_is_left_alone(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Made,
    reason: str,
    words: tuple[str, ...],
) -> None:
    """A path without `sqlite:///`, or of another file: one line, and nothing is written there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "objective.py").write_text("def objective(trial): return 0.0\n")
    path = tmp_path / "study.db"
    make(path)
    before = path.read_bytes()
    assert reason in _refused(capsys, *words, "--storage", path.name)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("studies",), "neither --storage nor $OPTUNA_STORAGE names one"),
        (("studies", "--storage", ""), "neither --storage nor $OPTUNA_STORAGE names one"),
        (("studies", "--storage", "foo"), "Storage foo cannot be used: no such file"),
        (("studies", "--storage", "."), "Storage . cannot be used: it is a folder. Check the URL"),
        (
            ("studies", "--storage", "sqlite:foo.db"),
            "Storage sqlite:foo.db cannot be used: it is no URL, and no such file is there. Check",
        ),
        (("create-study", "--study-name", "t", "--storage", "foo"), "Storage foo cannot be"),
    ],
)
def test_optunas_verbs_refuse_a_storage_in_one_line_too(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    reason: str,
) -> None:
    """None at all, or one that Optuna does not know: no page of help on standard output."""
    monkeypatch.delenv("OPTUNA_STORAGE", raising=False)
    assert run(words) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    assert reason in said.err


def test_an_upgrade_of_no_database_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    """Optuna says so in a line of its own, with a status of its own."""
    assert run(("storage", "upgrade", "--storage", "foo")) == 2
    assert "Invalid RDBStorage URL" in capsys.readouterr().err


def test_an_empty_file_holds_no_study(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """To SQLite it is a database without tables."""
    path = tmp_path / "study.db"
    path.touch()
    words = ("status", "--storage", f"sqlite:///{path}", "--study-name", "s")
    assert "No study 's'" in _refused(capsys, *words)


NAME = "evil\x1b]0;owned\x07\x1b[2Jname"


def _named_to_harm(url: str) -> None:
    study = optuna.create_study(storage=url, study_name=NAME)
    attrs = {"note\x1b[2J": "x\x1b[2J"}
    study.add_trial(optuna.trial.create_trial(value=1.0, user_attrs=attrs))


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.parametrize(
    ("words", "status"),
    [
        (("study-names",), 0),
        (("studies",), 0),
        (("studies", "-f", "json"), 0),
        (("studies", "-f", "yaml"), 0),
        (("studies", "-f", "table"), 0),
        (("trials", "--study-name", NAME), 0),
        (("best-trial", "--study-name", NAME), 0),
        (("status", "--study-name", NAME), 2),
        (("status", "--study-name", "other\x1b[2J"), 2),
        (("optimize", "objective.py:objective", "--study-name", "other\x1b[2J"), 2),
        (("delete-study", "--study-name", "other\x1b[2J"), 2),
        (("create-study", "--study-name", "new\x1b[2J"), 0),
        (("create-study", "--study-name", NAME), 2),
        (("\x1b[2J",), 2),
        (("--\x1b[2J",), 2),
    ],
    ids=lambda each: each[0] if isinstance(each, tuple) else str(each),
)
def test_a_name_cannot_command_the_terminal(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    storage_url: str,
    words: tuple[str, ...],
    status: int,
) -> None:
    """Control characters of names and values are spelled, by Optuna's verbs and by ours."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "objective.py").write_text("def objective(trial): return 0.0\n")
    _copy(_named_to_harm, storage_url)
    capsys.readouterr()  # Optuna's log of what this test does itself
    assert run((*words, "--storage", storage_url) if words[0].isprintable() else words) == status
    told = capsys.readouterr()
    said = told.out + told.err
    assert "[2J" in said or words[0] == "delete-study"  # Optuna names no study there
    assert "\x1b" not in said
    assert "\x07" not in said


def test_the_control_characters_of_optunas_log_are_spelled(
    cli: Callable[..., object], storage_url: str
) -> None:
    """In a process of its own, as people meet it."""
    done = cli("create-study", "--storage", storage_url, "--study-name", NAME)
    said = done.stdout + done.stderr  # type: ignore[attr-defined]
    assert "\\x1b[2Jname" in said
    assert "\x1b" not in said
    with sqlite3.connect(storage_url.removeprefix("sqlite:///")) as connection:
        assert connection.execute("SELECT study_name FROM studies").fetchall() == [(NAME,)]
    connection.close()
