"""A study on a real cluster of Ray with three nodes, on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil
import pytest

from optuna_hermes.broker import connect_or_start
from support.engines import BATCHES, Training, finished, make

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

N_TRIALS = 24


@pytest.fixture
def ray_cluster() -> Iterator[Any]:
    pytest.importorskip("ray", reason="needs Ray: pip install 'ray[default]'")
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=head)
    try:
        yield made
    finally:
        made.shutdown()


def environment(training: Training) -> dict[str, str]:
    """That of the command line."""
    return {
        "OPTUNA_HERMES_RUNTIME_DIR": "",
        "XDG_STATE_HOME": str(training.folder / "state"),
        "TEST_UNITS": "4",
    }


def brokers() -> list[psutil.Process]:
    """The brokers of hosts of a launch."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        is_broker = any("optuna_hermes.broker" in each for each in process.info["cmdline"] or ())
        with contextlib.suppress(psutil.Error):  # it has just ended
            if is_broker and process.environ().get("OPTUNA_HERMES_HOST", "").startswith("s-"):
                found.append(process)
    return found


def kill_supervisors() -> None:
    for process in psutil.process_iter(["cmdline"]):
        if any("ray::Supervisor" in word for word in process.info["cmdline"] or ()):
            process.kill()


PROGRESS_BAR = """
import sys
for percent in range(20_000):
    sys.stdout.write(f"\\r{percent} of 20000")
sys.stdout.write("\\nloaded\\nat work")
"""


def test_a_progress_bar_is_read_and_the_hosts_broker_ends_with_it(
    runtime_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wait_for: Callable[..., Any],
) -> None:
    """Of a line of 200 KB what a terminal would show is kept, whatever it was longer than."""
    ray_actors = pytest.importorskip("optuna_hermes.launch.ray_actors", exc_type=ImportError)
    monkeypatch.setattr(ray_actors, "_runtime_dir", lambda name: str(runtime_dir))
    monkeypatch.setattr(ray_actors, "_kept", lambda launch: {})
    connect_or_start("viewer", "cpu:1").close()
    host = ray_actors.RayHost("s-0", (), str(tmp_path), {}, 20, 1)
    host._command = [sys.executable, "-c", PROGRESS_BAR]
    assert asyncio.run(host.run()) == (0, ["19999 of 20000", "loaded", "at work"])
    wait_for(lambda: not (runtime_dir / "broker.sock").exists(), 10)


def test_a_host_may_be_stopped_while_its_process_is_created(
    runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would train to its end."""
    ray_actors = pytest.importorskip("optuna_hermes.launch.ray_actors", exc_type=ImportError)
    monkeypatch.setattr(ray_actors, "_runtime_dir", lambda name: str(runtime_dir))
    monkeypatch.setattr(ray_actors, "_kept", lambda launch: {})
    host = ray_actors.RayHost("s-0", (), str(tmp_path), {}, 20, 1)
    host._command = ["sleep", "60"]

    async def run_and_stop() -> tuple[int, list[str]]:
        running = asyncio.ensure_future(host.run())
        await asyncio.sleep(0)
        assert host._process is None
        await host.stop()
        return await asyncio.wait_for(running, 30)

    assert asyncio.run(run_and_stop()) == (75, [])


def test_a_host_that_ray_starts_anew_after_a_stop_trains_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first process was told, and Ray repeats its call."""
    ray_actors = pytest.importorskip("optuna_hermes.launch.ray_actors", exc_type=ImportError)
    monkeypatch.setattr(ray_actors, "_runtime_dir", lambda name: str(tmp_path))
    store = mock.MagicMock()
    monkeypatch.setattr(ray_actors, "internal_kv", store)
    host = ray_actors.RayHost("s-b-0", (), str(tmp_path), {}, 20, 1)
    host._command = ["touch", str(tmp_path / "trained")]
    store._internal_kv_get.side_effect = lambda launch, namespace: (
        '{"stopped": true, "ended": {}}' if launch == "s-b" else None
    )
    assert asyncio.run(host.run()) == (75, [])
    assert not (tmp_path / "trained").exists()


@pytest.mark.parametrize(("threads", "left"), [("4", None), ("2", "2"), (None, None)])
def test_threads_that_ray_has_set_are_not_those_of_each_trial(
    threads: str | None, left: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sets an actor's number of CPUs where a node has none; a node's own number counts."""
    ray_actors = pytest.importorskip("optuna_hermes.launch.ray_actors", exc_type=ImportError)
    monkeypatch.setattr(ray_actors, "_runtime_dir", lambda name: str(tmp_path))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    host = ray_actors.RayHost("s-0", (), str(tmp_path), {}, 20, 4)
    assert host._environment.get("OMP_NUM_THREADS") == left


def test_hosts_get_the_password_of_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their nodes may not have it, and a ledger's URL may hold none."""
    ray_actors = pytest.importorskip("optuna_hermes.launch.ray_actors", exc_type=ImportError)
    variables = {"OPTUNA_STORAGE": "grpc://host:13000", "PGPASSWORD": "sesame"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    ray = mock.MagicMock()
    monkeypatch.setattr(ray_actors, "ray", ray)
    monkeypatch.setattr(ray_actors, "internal_kv", mock.MagicMock())
    monkeypatch.setattr(ray_actors, "_kill_ended", lambda name: True)
    ray_actors.start(address="auto", namespace="n", name="s", arguments=())
    made = ray.remote.return_value.options.return_value.remote.call_args
    assert made.kwargs["environment"] == variables


def test_an_error_of_a_hosts_own_is_the_end_of_that_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the supervisor would end with it: the others' nodes would stay reserved."""
    ray_actors = pytest.importorskip("optuna_hermes.launch.ray_actors", exc_type=ImportError)
    killed: list[Any] = []
    monkeypatch.setattr(ray_actors.ray, "kill", killed.append)

    def run() -> None:
        raise ray_actors.ray.exceptions.RayTaskError("run", "no room", ValueError("no room"))

    supervisor = object.__new__(ray_actors.Supervisor)
    monkeypatch.setattr(supervisor, "_keep", lambda: None)
    actor = SimpleNamespace(run=SimpleNamespace(remote=run))
    supervisor._actors, supervisor._ended = [actor], {}
    asyncio.run(supervisor._follow(0))
    assert supervisor._ended[0][0] == 1
    assert killed == [actor]


def test_a_supervisor_may_be_stopped_before_it_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that Ray has just started anew: no host is begun then."""
    ray_actors = pytest.importorskip("optuna_hermes.launch.ray_actors", exc_type=ImportError)
    store = mock.MagicMock()
    store._internal_kv_get.return_value = ""
    monkeypatch.setattr(ray_actors, "internal_kv", store)
    monkeypatch.setattr(ray_actors, "ray", mock.MagicMock())
    monkeypatch.setattr(ray_actors, "get_placement_group", mock.MagicMock())
    monkeypatch.setattr(ray_actors, "remove_placement_group", mock.MagicMock())

    async def stop_and_begin() -> list[dict[str, str]]:
        supervisor = ray_actors.Supervisor("s", 2, {"CPU": 1.0})
        await supervisor.stop()
        await supervisor._watch()
        hosts: list[dict[str, str]] = await supervisor.hosts()
        return hosts

    assert [host["state"] for host in asyncio.run(stop_and_begin())] == ["suspended"] * 2


@pytest.mark.parametrize("lost", [False, True], ids=["all-stay", "one-is-lost"])
def test_every_node_trains_and_one_may_be_lost(
    lost: bool,
    ray_cluster: Any,
    cli: Callable[..., Any],
    postgres_url: str,
    training: Training,
    wait_for: Callable[..., Any],
) -> None:
    """24 of 24 complete; of the node that is gone one unit is trained again."""
    nodes = [ray_cluster.add_node(num_cpus=1) for _ in range(3)]
    make(postgres_url)
    env = environment(training)
    words = (
        *("launch", "ray", "--address", ray_cluster.address, "--hosts", 3, "--cpus", 1),
        *("--grace", 20, "--", training.target, "--storage", postgres_url, "--study-name", "s"),
        *("--n-trials", N_TRIALS, "--checkpoint-dir", training.folder / "checkpoints"),
    )
    launched = cli(*words, cwd=training.folder, env=env)
    assert launched.returncode == 0, launched.stderr
    wait_for(lambda: len(training.batches()) > 3 * BATCHES, 180)
    if lost:
        ray_cluster.remove_node(nodes[1], allow_graceful=False)

    def is_done() -> bool:
        return finished(postgres_url) == {"COMPLETE": N_TRIALS}

    wait_for(is_done, 600)
    asked = ("launch", "status", "s", "--json")
    hosts = json.loads(cli(*asked, cwd=training.folder, env=env).stdout)["hosts"]
    assert len(hosts) == 3
    repeated = training.repeated()
    assert len(repeated) <= (2 if lost else 0), repeated
    assert all(count <= BATCHES for count in repeated.values())
    cli("launch", "stop", "s", cwd=training.folder, env=env)


def test_the_same_launch_goes_on_and_so_does_one_whose_supervisor_is_lost(
    ray_cluster: Any,
    cli: Callable[..., Any],
    postgres_url: str,
    training: Training,
    wait_for: Callable[..., Any],
) -> None:
    """A job that has ended makes room for its next; one that is at work does not.

    Ray starts the supervisor anew, which begins what was at work again, and nothing that was
    stopped.
    """
    ray_cluster.add_node(num_cpus=1)
    make(postgres_url)
    env = environment(training)

    def launch(n_trials: int, **others: str) -> Any:
        words = (
            *("launch", "ray", "--address", ray_cluster.address, "--cpus", 1, "--grace", 20, "--"),
            *(training.target, "--storage", postgres_url, "--study-name", "s"),
            *("--n-trials", n_trials, "--checkpoint-dir", training.folder / "checkpoints"),
        )
        return cli(*words, cwd=training.folder, env={**env, **others})

    def states() -> list[str]:
        asked = cli("launch", "status", "s", "--json", cwd=training.folder, env=env)
        return [host["state"] for host in json.loads(asked.stdout)["hosts"]]

    assert launch(2).returncode == 0
    wait_for(lambda: states() == ["done"], 300)
    wait_for(lambda: not brokers(), 10)  # it would keep a GPU from the next launch
    assert finished(postgres_url) == {"COMPLETE": 2}
    begun = len(training.batches())
    again = launch(8)
    assert again.returncode == 0, again.stderr
    wait_for(lambda: len(training.batches()) > begun, 180)
    refused = launch(8)
    assert refused.returncode == 1
    assert "A job 's' is at work" in refused.stderr
    refused = launch(8, XDG_STATE_HOME=str(training.folder / "elsewhere"))
    assert "launch stop s` where it was launched" in " ".join(refused.stderr.split())
    kill_supervisors()
    wait_for(lambda: finished(postgres_url) == {"COMPLETE": 8}, 600)
    wait_for(lambda: states() == ["done"], 120)
    begun = len(training.batches())
    assert launch(16).returncode == 0
    wait_for(lambda: len(training.batches()) > begun, 180)
    assert cli("launch", "stop", "s", cwd=training.folder, env=env).returncode == 0
    wait_for(lambda: states() == ["suspended"], 60)
    begun = len(training.batches())
    kill_supervisors()
    answers = ("launch", "status", "s", "--json")
    wait_for(lambda: cli(*answers, cwd=training.folder, env=env).returncode == 0, 120)
    assert states() == ["suspended"]
    assert len(training.batches()) == begun
