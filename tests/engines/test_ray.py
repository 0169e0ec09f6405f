"""A study on a real cluster of Ray with three nodes, on this machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

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
    """A job that has ended makes room for its next; one that is at work does not."""
    ray_cluster.add_node(num_cpus=1)
    make(postgres_url)
    env = environment(training)

    def launch(n_trials: int) -> Any:
        words = (
            *("launch", "ray", "--address", ray_cluster.address, "--cpus", 1, "--grace", 20, "--"),
            *(training.target, "--storage", postgres_url, "--study-name", "s"),
            *("--n-trials", n_trials, "--checkpoint-dir", training.folder / "checkpoints"),
        )
        return cli(*words, cwd=training.folder, env=env)

    def states() -> list[str]:
        asked = cli("launch", "status", "s", "--json", cwd=training.folder, env=env)
        return [host["state"] for host in json.loads(asked.stdout)["hosts"]]

    assert launch(2).returncode == 0
    wait_for(lambda: states() == ["done"], 300)
    assert finished(postgres_url) == {"COMPLETE": 2}
    begun = len(training.batches())
    again = launch(8)
    assert again.returncode == 0, again.stderr
    wait_for(lambda: len(training.batches()) > begun, 180)
    refused = launch(8)
    assert refused.returncode == 1
    assert "A job 's' is at work" in refused.stderr
    for process in psutil.process_iter(["cmdline"]):
        if any("ray::Supervisor" in word for word in process.info["cmdline"] or ()):
            process.kill()
    wait_for(lambda: finished(postgres_url) == {"COMPLETE": 8}, 600)
    wait_for(lambda: states() == ["done"], 120)
    cli("launch", "stop", "s", cwd=training.folder, env=env)
