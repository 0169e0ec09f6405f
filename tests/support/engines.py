"""A training for tests of real engines, and a SLURM of three nodes on this machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import optuna
import psutil
from optuna.storages import RDBStorage

NODES = ("n1", "n2", "n3")
BATCHES = 10

OBJECTIVE = f"""
import os
import time
from pathlib import Path

import torch

from optuna_hermes.pytorch import suspendable

UNITS = int(os.environ.get("TEST_UNITS", "8"))


def objective(trial):
    torch.set_num_threads(1)
    torch.manual_seed(trial.number)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=trial.suggest_float("lr", 1e-3, 0.5))
    x = torch.randn(16, 4)
    run = suspendable(trial, model=model, optimizer=optimizer)
    for epoch in run.epochs(UNITS):
        for batch in run.batches(range({BATCHES})):
            loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(0.2)  # training
            with Path(__file__).with_name("batches").open("a") as file:
                host = os.environ.get("SLURMD_NODENAME", "") or os.uname().nodename
                words = (trial.number, epoch, batch, host, loss.item().hex())
                file.write(" ".join(map(str, words)) + "\\n")
        run.report(loss.item())
    return run.value
"""


@dataclass(frozen=True)
class Training:
    """The objective in a folder, and what its trials have noted there."""

    folder: Path

    @property
    def target(self) -> str:
        return f"{self.folder / 'train.py'}:objective"

    def batches(self) -> list[tuple[int, int, int, str, str]]:
        """Trial, epoch, batch, host and loss of each batch that was trained."""
        file = self.folder / "batches"
        lines = file.read_text().splitlines() if file.exists() else []
        rows = (line.split() for line in lines)
        return [(int(t), int(e), int(b), host, loss) for t, e, b, host, loss in rows]

    def hosts(self) -> set[str]:
        return {host for *_, host, _ in self.batches()}

    def repeated(self) -> dict[tuple[int, int], int]:
        """Count the batches of each trial's epoch that were trained again, with equal losses."""
        losses = defaultdict(list)
        for trial, epoch, batch, _, loss in self.batches():
            losses[trial, epoch, batch].append(loss)
        assert all(len(set(each)) == 1 for each in losses.values())
        found: dict[tuple[int, int], int] = defaultdict(int)
        for (trial, epoch, _), each in losses.items():
            found[trial, epoch] += len(each) - 1
        return {epoch: count for epoch, count in found.items() if count}


def finished(url: str) -> dict[str, int]:
    """Count the trials in each state."""
    storage = RDBStorage(url)
    try:
        study = optuna.load_study(study_name="s", storage=storage)
        states = [trial.state.name for trial in study.get_trials(deepcopy=False)]
    finally:
        storage.engine.dispose()
    return {state: states.count(state) for state in set(states)}


def make(url: str) -> None:
    storage = RDBStorage(url)
    optuna.create_study(study_name="s", storage=storage)
    storage.engine.dispose()


# -- SLURM -------------------------------------------------------------------------------------

_CONF = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldPort={ports[0]}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
KillWait=20
ReturnToService=2
JobRequeue=1
MpiDefault=none
SwitchType=switch/none
SlurmdTimeout=20
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 State=UNKNOWN
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 State=UNKNOWN
NodeName=n3 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[3]} CPUs=2 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=40 State=UP
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF State=UP
"""


@dataclass
class Cluster:
    """A controller and three daemons of SLURM, all on this machine."""

    folder: Path
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def start(self) -> None:
        """Start everything, and wait until the nodes are idle."""
        munge = self.folder / "munge"
        munge.mkdir(mode=0o755)
        (munge / "key").write_bytes(os.urandom(128))
        (munge / "key").chmod(0o400)
        files = ("socket", "key-file", "pid-file", "log-file", "seed-file")
        paths = [f"--{name}={munge / name.partition('-')[0]}" for name in files]
        self._start("munged", "munged", "--foreground", "--force", *paths)
        ports = [_free_port() for _ in range(1 + len(NODES))]
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (self.folder / name).mkdir()
        text = _CONF.format(folder=self.folder, ports=ports)
        (self.folder / "slurm.conf").write_text(text)
        self._start("slurmctld", "slurmctld", "-D")
        for node in NODES:
            self.start_node(node)
        self._wait(
            lambda: self.ask("sinfo", "-h", "-N", "-p", "low", "-o", "%t").count("idle") == 3
        )

    def start_node(self, node: str) -> None:
        self._start(node, "slurmd", "-D", "-N", node)

    def cut_power_of(self, node: str) -> None:
        """Kill a node's daemon, and all that runs there."""
        daemon = self.daemons.pop(node)
        steps = [
            process
            for process in psutil.process_iter(["cmdline"])
            if "slurmstepd: [" in " ".join(process.info["cmdline"] or []) and _is_of(process, node)
        ]
        daemon.kill()
        daemon.wait(10)
        for step in steps:
            for process in [*_tree(step), step]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()

    def ask(self, *words: str) -> str:
        done = subprocess.run(
            words, env=self.env, capture_output=True, text=True, timeout=60, check=False
        )
        return done.stdout

    def submit(self, script: str, *options: str, env: dict[str, str] | None = None) -> str:
        """Submit a job; returns its number."""
        done = subprocess.run(
            ["sbatch", "--parsable", *options],
            input=script,
            env={**self.env, **(env or {})},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return done.stdout.strip()

    def states(self, job: str) -> list[str]:
        """The states of a job's tasks; none once it is forgotten."""
        return self.ask("squeue", "-h", "-r", "-t", "all", "-j", job, "-o", "%T").split()

    def close(self) -> None:
        self.ask("scancel", "-u", "root")
        with suppress(TimeoutError):
            self._wait(lambda: not self.ask("squeue", "-h", "-t", "running").strip())
        for process in reversed(list(self.daemons.values())):
            process.send_signal(signal.SIGTERM)
        for process in self.daemons.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            process.wait()

    def _start(self, name: str, *words: str) -> None:
        with (self.folder / f"{name}.out").open("wb") as out:
            self.daemons[name] = subprocess.Popen(words, env=self.env, stdout=out, stderr=out)

    def _wait(self, holds: Callable[[], bool], seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > end:
                outs = [path.read_text()[-500:] for path in sorted(self.folder.glob("*.out"))]
                raise TimeoutError(self.ask("sinfo"), self.ask("squeue"), *outs)
            time.sleep(0.2)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _is_of(process: psutil.Process, node: str) -> bool:
    with suppress(psutil.Error):
        children = [process, *process.children(recursive=True)]
        return any(each.environ().get("SLURMD_NODENAME") == node for each in children)
    return False


def _tree(process: psutil.Process) -> list[psutil.Process]:
    """All processes that a step has started, those that are sessions of their own, too."""
    with suppress(psutil.Error):
        return process.children(recursive=True)
    return []
