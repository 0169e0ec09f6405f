"""Hosts on a database that has room for few connections."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy.pool import NullPool

from support.objectives import loop

N_HOSTS, N_TRIALS, UNITS = 4, 40, 3
MAX_CONNECTIONS, RESERVED = 20, 3
"""Of a server's connections three are kept for its superusers, by default."""

OBJECTIVE = loop(UNITS, seconds=0.1)


@pytest.fixture
def narrow_url(postgres: Any) -> Any:
    """A database of a user who may have as many connections as a small server leaves to users."""
    with postgres.database() as url:
        parsed = sqlalchemy.make_url(url)
        role = f"tuner_{parsed.database}"
        engine = sqlalchemy.create_engine(url, poolclass=NullPool)
        with engine.begin() as connection:
            limit = MAX_CONNECTIONS - RESERVED
            connection.exec_driver_sql(f"CREATE ROLE {role} LOGIN CONNECTION LIMIT {limit}")
            connection.exec_driver_sql(f"GRANT ALL ON SCHEMA public TO {role}")
        yield parsed.set(username=role).render_as_string(hide_password=False)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_four_hosts_and_forty_live_trials_on_twenty_connections(
    start_cli: Callable[..., Any],
    narrow_url: str,
    tmp_path: Path,
    runtime_dir: Path,
) -> None:
    """All of it completes, and no unit is trained twice; parked trials keep no connection."""
    file = tmp_path / "training.py"
    file.write_text(OBJECTIVE)
    running = []
    for number in range(N_HOSTS):
        own = runtime_dir / str(number)
        own.mkdir(mode=0o700)
        env = {"OPTUNA_HERMES_RUNTIME_DIR": str(own), "OPTUNA_HERMES_HOST": f"host-{number}"}
        words = [
            *("optimize", f"{file}:objective", "--storage", narrow_url, "--study-name", "s"),
            *("--n-trials", N_TRIALS, "--devices", "cpu:2", "--seed", number, "--json"),
            *("--policy", "round-robin", "--slice-seconds", 0.3),
            *("--checkpoint-dir", tmp_path / "checkpoints"),
        ]
        running.append(start_cli(*words, env={**env, "OPTUNA_HERMES_BROKER_IDLE_SECONDS": "0.5"}))
    begin = time.monotonic()
    done = [each.wait(600 - (time.monotonic() - begin)) for each in running]
    for each in done:
        assert each.returncode == 0, each.stderr
        states = [trial["state"] for trial in json.loads(each.stdout)["trials"]]
        assert states == ["COMPLETE"] * N_TRIALS
    units = Counter((tmp_path / "trained").read_text().splitlines())
    assert set(units.values()) == {1}
    assert len(units) == N_TRIALS * UNITS
