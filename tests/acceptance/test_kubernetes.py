"""A pod as a kubelet runs it: its command, its signals, and the end of its grace period."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from optuna_hermes.errors import ExitStatus
from support.objectives import loop

kubernetes_validate = pytest.importorskip(
    "kubernetes_validate", reason="needs kubernetes-validate: pip install kubernetes-validate"
)

N_TRIALS, UNITS, GRACE_SECONDS = 20, 10, 60
STATE_BYTES = 100_000_000

TABLE = f"""\
model.register_buffer("table", torch.full(({STATE_BYTES // 4},), float(trial.number)))
"""
CHECK = """\
assert model.table[epoch] == trial.number
model.table[epoch] += 1
"""
OBJECTIVE = loop(UNITS, set_up=TABLE, each_unit=CHECK)


def trained(tmp_path: Path) -> list[tuple[int, int]]:
    file = tmp_path / "trained"
    lines = file.read_text().splitlines() if file.exists() else []
    return [(int(trial), int(epoch)) for trial, epoch in map(str.split, lines)]


def pod_of(text: str) -> dict[str, Any]:
    """The container of the manifest, which is valid for Kubernetes."""
    (manifest,) = (each for each in yaml.safe_load_all(text) if each["kind"] == "Job")
    kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)
    pod = manifest["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == GRACE_SECONDS
    (container,) = pod["containers"]
    return dict(container)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_pod_that_is_evicted_suspends_all_and_its_next_one_goes_on(
    cli: Callable[..., Any],
    postgres_url: str,
    tmp_path: Path,
    runtime_dir: Path,
    wait_for: Callable[..., Any],
) -> None:
    """Twenty live trials of 100 MB: SIGTERM to the container's process, SIGKILL a minute later."""
    file = tmp_path / "training.py"
    file.write_text(OBJECTIVE)
    claim = ("--image", "train:1", "--claim", "c", "--grace", GRACE_SECONDS, "--dry-run", "--")
    study = (f"{file}:objective", "--study-name", "s", "--n-trials", N_TRIALS, "--json")
    devices = ("--devices", "cpu:2", "--policy", "round-robin", "--slice-seconds", 0.2)
    words = ("launch", "kubernetes", *claim, *study, *devices, "--storage", postgres_url)
    printed = cli(*words)
    assert printed.returncode == 0, printed.stderr
    container = pod_of(printed.stdout)
    program, *arguments = (
        each.replace("/checkpoints", f"{tmp_path}/checkpoints") for each in container["command"]
    )
    assert program == "optuna-hermes"
    told = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    env = {**os.environ, **told, "OPTUNA_STORAGE": postgres_url, "OPTUNA_HERMES_HOST": "pod-0"}
    del env["OPTUNA_HERMES_METRICS"]  # the port is a pod's own, and this host has others

    def pod(name: str) -> subprocess.Popen[bytes]:
        out, err = tmp_path / f"{name}.out", tmp_path / f"{name}.err"
        with out.open("wb") as stdout, err.open("wb") as stderr:
            return subprocess.Popen(
                [sys.executable, "-m", "optuna_hermes", *arguments],
                cwd=tmp_path,
                env=env,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )

    first = pod("first")
    try:
        wait_for(lambda: len({trial for trial, _ in trained(tmp_path)}) == N_TRIALS, 300)
        begin = time.monotonic()
        first.send_signal(signal.SIGTERM)
        first.wait(GRACE_SECONDS)
        took = time.monotonic() - begin
    finally:
        if first.poll() is None:
            os.killpg(first.pid, signal.SIGKILL)
    assert first.returncode == ExitStatus.SUSPENDED, (tmp_path / "first.err").read_text()
    states = Counter(
        each["state"] for each in json.loads((tmp_path / "first.out").read_text())["trials"]
    )
    assert states["STORED"] >= N_TRIALS / 2, (states, took)
    assert set(states) <= {"STORED", "COMPLETE"}

    second = pod("second")
    try:
        second.wait(300)
    finally:
        if second.poll() is None:
            os.killpg(second.pid, signal.SIGKILL)
    assert second.returncode == 0, (tmp_path / "second.err").read_text()
    units = Counter(trained(tmp_path))
    assert set(units.values()) == {1}
    assert len(units) == N_TRIALS * UNITS
