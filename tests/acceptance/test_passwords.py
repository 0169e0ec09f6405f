"""The password of a study's database is shown to the database only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus
from uuid import uuid4

import psutil
import pytest
import sqlalchemy

from support.databases import DatabaseServer

OBJECTIVE = """
import os, time
import optuna

def objective(trial):
    x = trial.suggest_float("x", 0, 1)
    print("about to train", trial.study._storage)
    for unit in range(1, 4):
        trial.report(x / unit, unit)
        if trial.should_prune():
            raise optuna.TrialPruned
        open(f"there-{trial.number}", "w").close()
        while not os.path.exists("go"):
            time.sleep(0.01)
    if trial.number == 1:
        raise ValueError(f"trial {trial.number} of {trial.study.study_name} is broken")
    return x
"""

SECRET = "Pa55 w/rd@:%&ü"
SPELLINGS = {SECRET, quote(SECRET), quote(SECRET, safe=""), quote_plus(SECRET), "Pa55"}

Cli = Callable[..., subprocess.CompletedProcess[str]]


def with_passwords(url: str) -> str:
    """The URL with one password before the host and one among the options."""
    made = sqlalchemy.make_url(url).set(password=SECRET)
    made = made.set(query={**made.query, "sslpassword": SECRET})
    return made.render_as_string(hide_password=False)


def processes(runtime_dir: Path) -> Iterator[psutil.Process]:
    """Broker, fork server and workers, and whatever else was started for this study."""
    for process in psutil.process_iter():
        try:
            if process.environ().get("OPTUNA_HERMES_RUNTIME_DIR") == str(runtime_dir):
                yield process
        except (psutil.Error, OSError):
            continue


def rows(url: str) -> str:
    """Every row of every table of a database."""
    engine = sqlalchemy.create_engine(url)
    with engine.connect() as connection:
        names = sqlalchemy.inspect(connection).get_table_names()
        assert any(name.startswith("hermes_") for name in names)
        found = [connection.exec_driver_sql(f'select * from "{name}"').all() for name in names]
    engine.dispose()
    return repr(found)


def test_a_password_is_written_nowhere(
    cli: Cli,
    start_cli: Callable[..., Any],
    postgres_url: str,
    runtime_dir: Path,
    tmp_path: Path,
    wait_for: Callable[..., Any],
) -> None:
    """Neither what is printed, logged, stored nor shown by ``ps`` holds it, in any spelling."""
    url = with_passwords(postgres_url)
    (tmp_path / "o.py").write_text(OBJECTIVE)
    study = ("--storage", url, "--study-name", "s")
    folder = tmp_path / "checkpoints"
    options = ("--n-trials", 2, "--devices", "cpu:2", "--checkpoint-dir", folder)
    running = start_cli("optimize", "o.py:objective", *study, *options)
    wait_for(lambda: len(list(tmp_path.glob("there-*"))) == 2, 60)
    seen: dict[str, str] = {}
    for process in processes(runtime_dir):
        if process.pid not in (running.process.pid, os.getpid()):
            told = [*process.cmdline(), *process.environ().values()]
            seen[f"process {process.cmdline()[1:4]} {process.pid}"] = "\n".join(told)
    assert len(seen) >= 4, "broker, fork server and two workers"
    (tmp_path / "go").touch()
    done = running.wait()
    seen["optimize"] = done.stdout + done.stderr
    for words in (
        ("status", *study, "--json"),
        ("gc", *study, "--dry-run", "--json"),
        ("best-trial", "--storage", url, "--study-name", "other"),
        ("optimize", "o.py:objective", *study, "--devices", "no"),
    ):
        answer = cli(*words)
        seen[f"optuna-hermes {words[0]}"] = answer.stdout + answer.stderr
    for path in (*runtime_dir.rglob("*"), *folder.rglob("*")):
        if path.is_file():
            seen[str(path)] = path.read_bytes().decode(errors="replace")
    assert any("trial 1 of s is broken" in text for text in seen.values())
    seen["the database"] = rows(url)
    leaks = [(name, word) for name, text in seen.items() for word in SPELLINGS if word in text]
    assert leaks == []


def test_a_password_in_the_environment_does_not_reach_the_broker(
    cli: Cli, runtime_dir: Path
) -> None:
    """``OPTUNA_STORAGE`` keeps a password out of ``ps``, and ends with the study's processes."""
    url = f"postgresql://ann:{quote(SECRET, safe='')}@127.0.0.1:1/none"
    answer = cli("status", "--study-name", "s", env={"OPTUNA_STORAGE": url})
    assert answer.returncode == 2
    assert "postgresql://ann:***@127.0.0.1:1/none" in answer.stderr
    assert not any(word in answer.stdout + answer.stderr for word in SPELLINGS)
    script = (
        "from optuna_hermes.broker import connect_or_start; connect_or_start('viewer', 'cpu:1')"
    )
    subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "OPTUNA_STORAGE": url}, check=True
    )
    pid = json.loads((runtime_dir / "broker.json").read_text())["pid"]
    assert "OPTUNA_STORAGE" not in psutil.Process(pid).environ()


@pytest.fixture
def guarded_url(postgres: DatabaseServer, postgres_url: str) -> Iterator[str]:
    """An empty database whose user needs a password, which the URL lacks."""
    name = f"ann_{uuid4().hex}"
    postgres.execute(f"CREATE ROLE {name} SUPERUSER LOGIN PASSWORD '{SECRET}'".replace("%", "%%"))
    rules = Path(postgres.execute("SHOW hba_file")[0])
    before = rules.read_text()
    rules.write_text(f"local all {name} scram-sha-256\n{before}")
    postgres.execute("SELECT pg_reload_conf()")
    url = sqlalchemy.make_url(postgres_url)
    yield sqlalchemy.URL.create(
        url.drivername, name, host=url.host, database=url.database, query=url.query
    ).render_as_string(hide_password=False)
    rules.write_text(before)
    postgres.execute("SELECT pg_reload_conf()")
    postgres.execute(
        f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{name}'"
    )


def test_a_password_in_the_environment_is_given_to_a_broker_that_is_there(
    cli: Cli, guarded_url: str, runtime_dir: Path, tmp_path: Path
) -> None:
    """It was started without; and nothing of the password is printed, or written beside it."""
    script = (
        "from optuna_hermes.broker import connect_or_start; connect_or_start('viewer', 'cpu:1')"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    broker = psutil.Process(json.loads((runtime_dir / "broker.json").read_text())["pid"])
    (tmp_path / "o.py").write_text(OBJECTIVE)
    (tmp_path / "go").touch()
    command = ("optimize", "o.py:objective", "--storage", guarded_url, "--study-name", "s")
    options = ("--n-trials", 1, "--devices", "cpu:1")
    done = cli(*command, *options, env={"PGPASSWORD": SECRET})
    assert done.returncode == 0, done.stderr
    assert broker.is_running()
    written = [path.read_bytes() for path in runtime_dir.rglob("*") if path.is_file()]
    texts = [done.stdout, done.stderr, *(each.decode(errors="replace") for each in written)]
    assert [word for text in texts for word in SPELLINGS if word in text] == []


def test_a_password_that_is_missing_is_no_outage(
    cli: Cli, guarded_url: str, tmp_path: Path
) -> None:
    """It is said at once: status 75 would have a manager run the command again for ever."""
    (tmp_path / "o.py").write_text(OBJECTIVE)
    command = ("optimize", "o.py:objective", "--storage", guarded_url, "--study-name", "s")
    done = cli(*command, deadline_seconds=50.0)
    assert done.returncode == 2
    assert "no password supplied" in done.stderr
