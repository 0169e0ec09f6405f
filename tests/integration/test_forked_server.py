"""``optimize()`` in a script: its fork server is a fork of the script, or a new Python."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import psutil
import pytest

Script = Callable[..., subprocess.CompletedProcess[str]]

WATCHED = """
import os, sys, threading
import optuna
from optuna_hermes import HermesPruner, HermesSampler, optimize, suspendable
from optuna_hermes.workers import _worker_pool

class Pool(_worker_pool.WorkerPool):
    def __init__(self, *words):
        super().__init__(*words)
        print("new Python:", self.new_python)

_worker_pool.WorkerPool = Pool

def with_a_thread():
    threading.Thread(target=threading.Event().wait, daemon=True).start()

def make():
    return optuna.create_study(
        storage=f"sqlite:///{os.environ.get('STUDY', 'study')}.db",
        study_name="s", load_if_exists=True,
        sampler=HermesSampler(), pruner=HermesPruner(),
    )
"""
"""Says which way was taken."""

FORKED, THREADS = "new Python: None", "new Python: threads were started"


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """``start(code, *arguments, env=)`` starts a script in ``tmp_path``."""

    def run(code: str, *arguments: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        (tmp_path / "train.py").write_text(WATCHED + code)
        return subprocess.Popen(
            [sys.executable, "train.py", *arguments],
            cwd=tmp_path,
            env=dict(os.environ) if env is None else env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return run


@pytest.fixture
def script(start: Callable[..., subprocess.Popen[str]]) -> Script:
    """As ``start``, to the script's end."""

    def run(*words: Any, **options: Any) -> subprocess.CompletedProcess[str]:
        running = start(*words, **options)
        out, err = running.communicate(timeout=120)
        return subprocess.CompletedProcess(running.args, running.returncode, out, err)

    return run


def trials(tmp_path: Path, name: str = "study") -> list[optuna.trial.FrozenTrial]:
    storage = f"sqlite:///{tmp_path / name}.db"
    return optuna.load_study(study_name="s", storage=storage).trials


SETTINGS = """
import fractions, signal, threading
with open("ran", "a") as file:
    print("ran", file=file)
lock = threading.Lock()  # cannot be pickled
fractions.setting = "as imported"

def never(number, frame):
    raise SystemExit("a handler of the script's")

def objective(trial):
    with lock:
        x = trial.suggest_float("x", 0.0, 1.0)
    print("handler:", signal.getsignal(signal.SIGALRM) is signal.SIG_DFL)
    print("setting:", fractions.setting)
    print("input:", repr(sys.stdin.read()))
    if trial.number == 0:
        raise ValueError("no good")
    return x

if __name__ == "__main__":
    fractions.setting = "under the guard"
    signal.signal(signal.SIGALRM, never)
    unwritten = open("unwritten", "w")
    unwritten.write("once, ")
    print("buffered, ", end="")
    study = make()
    try:
        for most in (2, 4):  # the second call finds nothing open either
            optimize(study, objective, n_trials=most, devices="cpu:1", show_progress=False)
        print("end")
    finally:
        print("left once")
"""


def test_trials_find_what_the_script_has_set(script: Script, tmp_path: Path) -> None:
    """The script runs once, and trials are forks of it: only its handlers and input are not theirs.

    What it has printed or written and not flushed comes once.
    """
    done = script(SETTINGS)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"buffered, {FORKED}\n{FORKED}\nend\nleft once\n"
    assert (tmp_path / "ran").read_text() == "ran\n"
    assert (tmp_path / "unwritten").read_text() == "once, "
    assert [trial.state.name for trial in trials(tmp_path)] == ["FAIL", *["COMPLETE"] * 3]
    logs = sorted((tmp_path / "study.db.hermes").rglob("output.log"))
    words = [log.read_text() for log in logs]
    assert len(words) == 4
    wanted = "handler: True\nsetting: under the guard\ninput: ''\n"
    assert all(each.startswith(wanted) for each in words)
    assert "ValueError: no good" in words[0]


DEBUGGED = """
import cProfile

def objective(trial):
    x = trial.suggest_float("x", 0.0, 1.0)  # a breakpoint
    cProfile.Profile().runcall(int)
    return x

if __name__ == "__main__":
    cProfile.Profile().enable()
    optimize(make(), objective, n_trials=2, devices="cpu:1", show_progress=False)
"""


def test_a_debugger_and_a_profiler_stay_with_the_script(tmp_path: Path) -> None:
    """At a breakpoint in a trial nobody could say how to go on; it may have a profiler itself."""
    script = WATCHED + DEBUGGED
    (tmp_path / "train.py").write_text(script)
    line = script.partition("# a breakpoint")[0].count("\n") + 1
    done = subprocess.run(
        [sys.executable, "-m", "pdb", "-c", f"break train.py:{line}", "-c", "continue", "train.py"],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert f"Breakpoint 1 at {tmp_path / 'train.py'}:{line}" in done.stdout
    assert FORKED in done.stdout
    assert [trial.state.name for trial in trials(tmp_path)] == ["COMPLETE"] * 2, done.stderr


CONNECTED = """
import sqlite3

def objective(trial):
    return trial.suggest_float("x", 0.0, 1.0)

study = make()
own = sqlite3.connect("study.db")
own.execute("select 1 from studies").fetchall()
optimize(study, objective, n_trials=2, devices="cpu:1", show_progress=False)
own.execute("select 1 from studies").fetchall()
"""


def test_a_script_with_a_connection_of_its_own_is_not_forked(script: Script) -> None:
    """SQLite counts locks by process: a fork would take the script's for its own."""
    done = script(CONNECTED)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "new Python: the study's database may be open\n"


PICKLED = """
with_a_thread()
lock = threading.Lock()

def objective(trial):
    with lock:
        return trial.suggest_float("x", 0.0, 1.0)

optimize(make(), objective, n_trials=2, devices="cpu:1", show_progress=False)
"""


def test_an_objective_for_a_new_python_must_be_picklable(script: Script) -> None:
    """The object that cannot be sent to the new Python is named as ever."""
    done = script(PICKLED)
    assert done.returncode == 1
    words = "The objective must be picklable, since threads were started, but "
    assert words in done.stderr.splitlines()[-1]


TWICE = """
lock = threading.Lock()

def objective(trial):
    with lock:
        return trial.suggest_float("x", 0.0, 1.0)

def go(name):
    study = optuna.create_study(
        storage="sqlite:///study.db", study_name=name,
        sampler=HermesSampler(), pruner=HermesPruner(),
    )
    optimize(study, objective, n_trials=1, devices="cpu:1", show_progress=False)

go("a")
go("b")
"""


def test_a_study_that_nothing_refers_to_keeps_no_fork_from_the_next(script: Script) -> None:
    """It waits for the garbage collector, with its connection to the file."""
    done = script(TWICE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [FORKED, FORKED]


STRANGE = """
def objective(trial):
    x = trial.suggest_float("x", -5.0, 5.0)
    with open("begun", "a") as begun:
        begun.write("x")
    for step in range(2):
        pid = os.fork()
        if pid == 0:
            sys.exit(int(x == 2.0))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == int(x == 2.0)
        trial.report(x, step)
    if x == 1.0 and os.fork() == 0:
        return 7.0
    trial.set_constraint("c", -x) if hasattr(trial, "set_constraint") else None
    return "many" if x == 3.0 else x

study = make()
for x in (-4.0, 1.0, 2.0, 3.0):
    study.enqueue_trial({"x": x})
result = optimize(study, objective, n_trials=4, devices="cpu:1", show_progress=False)
print([(trial.state.name, trial.value) for trial in study.trials])
print(result.best["value"], len(open("begun").read()))
"""


def test_a_process_that_a_trial_forks_is_no_trial(script: Script) -> None:
    """Its end is not the trial's; an infeasible trial is not the best; a text is no value."""
    done = script(STRANGE)
    assert done.returncode == 0, done.stderr
    states, best = done.stdout.splitlines()[-2:]
    one = "('COMPLETE', {})"
    whole = [one.format(x) for x in (-4.0, 1.0, 2.0)]
    assert states == f"[{', '.join([*whole, repr(('FAIL', None))])}]"
    constrained = hasattr(optuna.Trial, "set_constraint")
    assert best == ("1.0 4" if constrained else "-4.0 4")


THREADED_LATE = """
from optuna_hermes.workers import _preload
_preload._LIBRARIES["late"] = ("late",)
ran = "by value"

def objective(trial):
    import late
    print(ran)
    return trial.suggest_float("x", 0.0, 1.0)

optimize(make(), objective, n_trials=2, devices="cpu:1", show_progress=False)
"""


def test_a_forked_server_may_start_new_workers(script: Script, tmp_path: Path) -> None:
    """Workers are new processes, as ever, where an import of the server's has started threads."""
    (tmp_path / "late.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    done = script(THREADED_LATE)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{FORKED}\n"
    assert "Workers are not forked" in done.stderr
    logs = list((tmp_path / "study.db.hermes").rglob("output.log"))
    assert [log.read_text() for log in logs] == ["by value\n"] * 2


COMPUTING = """
import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.use_deterministic_algorithms(True)

def objective(trial):
    rng = np.random.default_rng(trial.number)
    matrix = rng.standard_normal((300, 300))
    own = np.linalg.eigh(matrix @ matrix.T)[0]
    x = torch.randn(2048, 64)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=trial.suggest_float("lr", 1e-3, 1e-2))
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=512, shuffle=True)
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(torch.get_num_threads(), loss.item().hex(), own.tobytes().hex())
    return loss.item()

if __name__ == "__main__":
    big = np.ones((600, 600)) @ np.ones((600, 600))  # threads have begun
    torch.ones(1 << 20, requires_grad=True).mul(2).sum().backward()
    way, devices = sys.argv[1:]
    if way == "thread":
        with_a_thread()
    optimize(make(), objective, n_trials=1, devices=devices, seed=0, show_progress=False)
"""


@pytest.mark.parametrize("devices", [pytest.param("cpu:1", marks=pytest.mark.slow), "cpu:2"])
def test_both_ways_compute_the_same(script: Script, tmp_path: Path, devices: str) -> None:
    """Libraries that the script has loaded take as many threads as in a new process, to the bit."""
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    words = []
    for way in ("fork", "thread"):
        # Another file for each: the broker has the first one open for a while.
        done = script(COMPUTING, way, devices, env={**env, "STUDY": way})
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"{FORKED if way == 'fork' else THREADS}\n"
        (log,) = (tmp_path / f"{way}.db.hermes").rglob("output.log")
        words.append(log.read_text())
    assert words[0] == words[1]


SUSPENDED = """
import time
import torch
from torch.utils.data import DataLoader, TensorDataset

def objective(trial):
    x = torch.randn(64, 4)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=trial.suggest_float("lr", 1e-3, 1e-1))
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16, shuffle=True)
    run = suspendable(trial, model=model, optimizer=optimizer)
    for epoch in run.epochs(6):
        for x, y in run.batches(loader):
            if slow and epoch == 3:
                time.sleep(0.5)
            loss = torch.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        run.report(loss.item())
    return run.value

slow = "slow" in sys.argv
if __name__ == "__main__":
    if "thread" in sys.argv:
        with_a_thread()
    optimize(
        make(), objective, n_trials=2, devices="cpu:2", seed=0, slice_seconds=0.1,
        policy="round-robin", show_progress=False,
    )
"""


@pytest.mark.slow
def test_a_trial_may_begin_in_a_fork_and_go_on_in_a_new_python(
    start: Callable[..., subprocess.Popen[str]],
    script: Script,
    cli: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
    wait_for: Callable[..., Any],
) -> None:
    """Values are those of trials that were never interrupted, to the bit, whoever trains them."""

    def values(name: str = "study") -> list[dict[int, float]]:
        return [trial.intermediate_values for trial in trials(tmp_path, name)]

    def interrupt(*words: str) -> str:
        began = len([unit for each in values() for unit in each])
        running = start(SUSPENDED, *words, "slow")
        wait_for(lambda: len([unit for each in values() for unit in each]) > began, 60)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=60)
        assert "KeyboardInterrupt" in err
        return out

    whole = script(SUSPENDED, "thread", env={**os.environ, "STUDY": "whole"})
    assert whole.stdout == f"{THREADS}\n"
    wanted = values("whole")
    assert [len(each) for each in wanted] == [6, 6]
    optuna.create_study(study_name="s", storage=f"sqlite:///{tmp_path / 'study.db'}")
    assert interrupt() == f"{FORKED}\n"
    assert interrupt("thread") == f"{THREADS}\n"
    options = ("--storage", "sqlite:///study.db", "--study-name", "s", "--devices", "cpu:2")
    done = cli("optimize", "train.py:objective", "--n-trials", 2, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert values() == wanted


SLEEPING = """
import time

def objective(trial):
    trial.report(trial.suggest_float("x", 0.0, 1.0), 0)
    time.sleep(600)

optimize(make(), objective, n_trials=2, devices="cpu:2", show_progress=False)
"""


def test_a_script_that_is_killed_leaves_no_process(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path, wait_for: Callable[..., Any]
) -> None:
    """The kernel ends the fork server with it, and workers with the fork server."""
    optuna.create_study(study_name="s", storage=f"sqlite:///{tmp_path / 'study.db'}")
    running = start(SLEEPING)
    wait_for(lambda: [len(t.intermediate_values) for t in trials(tmp_path)] == [1, 1], 60)
    family = [
        each
        for each in psutil.Process(running.pid).children(recursive=True)
        if not any("optuna_hermes.broker" in part for part in each.cmdline())
    ]
    assert len(family) >= 3  # the fork server and two workers
    assert os.getpgid(running.pid) not in {os.getpgid(each.pid) for each in family}
    running.kill()
    running.communicate(timeout=30)  # nobody holds its output either
    for each in family:
        each.wait(30)


MANY = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
objective = lambda trial: trial.suggest_float("x", 0.0, 1.0)
optimize(make(), objective, n_trials=8, devices="cpu:1", timeout=60.0, show_progress=False)
"""


def test_a_script_that_has_blocked_the_signal_of_a_childs_end(
    script: Script, tmp_path: Path
) -> None:
    """As some programs leave it to those that they start: more trials train than at first."""
    done = script(MANY)
    assert done.returncode == 0, done.stderr
    assert [trial.state.name for trial in trials(tmp_path)] == ["COMPLETE"] * 8


@pytest.mark.parametrize("words", [(), ("thread",)])
def test_a_call_goes_on_where_its_fork_server_was_killed(
    script: Script,
    start: Callable[..., subprocess.Popen[str]],
    tmp_path: Path,
    wait_for: Callable[..., Any],
    words: tuple[str, ...],
) -> None:
    """Another one is started, as the first one was, and trials go on from their checkpoints."""
    script(SUSPENDED, *words, env={**os.environ, "STUDY": "whole"})
    optuna.create_study(study_name="s", storage=f"sqlite:///{tmp_path / 'study.db'}")
    running = start(SUSPENDED, *words, "slow")
    wait_for(lambda: [bool(t.intermediate_values) for t in trials(tmp_path)] == [True] * 2, 60)
    servers = [p for p in psutil.Process(running.pid).children() if p.children()]
    (server,) = [p for p in servers if not any("optuna_hermes.broker" in w for w in p.cmdline())]
    server.kill()
    _, err = running.communicate(timeout=120)
    assert running.returncode == 0, err
    assert "(SIGKILL, by the kernel, if memory has run out). Starting another one" in err
    ended = [trial.intermediate_values for trial in trials(tmp_path)]
    assert ended == [trial.intermediate_values for trial in trials(tmp_path, "whole")]


POSITIONS = """
import numpy as np

with open("lines.txt", "w") as file:
    file.writelines(f"{number:06d}\\n" for number in range(20_000))
FILE = open("lines.txt")

def objective(trial):
    for epoch in range(3):
        FILE.seek(0)
        for number, line in enumerate(FILE):
            assert int(line) == number, (number, line)
            if number % 5_000 == 0:  # in the midst of a pass
                trial.report(number, 10 * epoch + number // 5_000)
                trial.should_prune()
    return 0.0

if __name__ == "__main__":
    turns = {"policy": "round-robin", "slice_seconds": 0.01}
    optimize(make(), objective, n_trials=4, devices="cpu:1", show_progress=False, **turns)
"""


def test_trials_have_positions_of_their_own_in_open_files(script: Script, tmp_path: Path) -> None:
    """A fork shares that of its parent: trials that take turns would read on from each other's."""
    done = script(POSITIONS)
    assert done.returncode == 0, done.stderr
    assert [trial.state.name for trial in trials(tmp_path)] == ["COMPLETE"] * 4, done.stderr


UNCLOSED = """
HEADER = open("all.txt", "a")
print("header", file=HEADER)
FILES = []  # of which nothing is collected while its process lives

def objective(trial):
    FILES.append(open(f"{trial.number}.txt", "a"))
    run = suspendable(trial)
    for epoch in run.epochs(4):
        print(epoch, file=FILES[0])
        print(trial.number, epoch, file=HEADER)
        run.report(1.0)
    return 1.0

if __name__ == "__main__":
    study, some = make(), {"devices": "cpu:1", "policy": "round-robin", "slice_seconds": 0.01}
    optimize(study, objective, n_trials=2, device_seconds=1e-6, **some)
    print("units:", sum(len(trial.intermediate_values) for trial in study.trials))
    optimize(study, sys.argv[1] if sys.argv[1:] else objective, n_trials=2, **some)
"""


@pytest.mark.parametrize("words", [(), ("train.py:objective",)], ids=["fork", "new Python"])
def test_files_that_nobody_closes_have_all_that_trials_have_written(
    script: Script, tmp_path: Path, words: tuple[str, ...]
) -> None:
    """Each line once and in order, also of a trial that went to disk."""
    done = script(UNCLOSED, *words)
    assert done.returncode == 0, done.stderr
    assert "units: 8" not in done.stdout
    for number in range(2):
        assert (tmp_path / f"{number}.txt").read_text() == "0\n1\n2\n3\n"
    lines = (tmp_path / "all.txt").read_text().splitlines()
    headers = [line for line in lines if line == "header"]
    assert len(headers) == 1 + len(words)  # a new Python imports the script once more
    assert sorted(set(lines) - {"header"}) == [
        f"{n} {epoch}" for n in range(2) for epoch in range(4)
    ]
    assert len(lines) == len(headers) + 8


ONCE = """
import time
from optuna_hermes import once

LOG = open("log.txt", "a")

def load():
    print("loaded by", os.getpid(), file=LOG)
    return 1.0

def objective(trial):
    value = once(load)
    print("child of", os.getppid(), file=LOG)
    run = suspendable(trial)
    for epoch in run.epochs(4):
        time.sleep(0.02)
        run.report(value)
    return value

if __name__ == "__main__":
    optimize(make(), objective, n_trials=12, devices="cpu:2")
"""


def test_what_once_has_written_is_in_an_unclosed_file_once(script: Script, tmp_path: Path) -> None:
    """Not again with each process that inherits its value."""
    done = script(ONCE)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "log.txt").read_text().splitlines()
    loads = [line.removeprefix("loaded by ") for line in lines if line.startswith("loaded by ")]
    assert any(f"child of {pid}" in lines for pid in loads)
    assert len(loads) == len(set(loads))


REFUSED = """
forks = []
really = os.fork

def fork():
    import sys
    if sys._getframe(1).f_code.co_name == "_fork":
        forks.append(1)
        if len(forks) == 1:
            raise BlockingIOError(11, "Resource temporarily unavailable")
    return really()

os.fork = fork

def objective(trial):
    return trial.suggest_float("x", 0.0, 1.0)

if __name__ == "__main__":
    optimize(make(), objective, n_trials=6, devices="cpu:1")
    print("went on")
"""


def test_a_fork_that_is_refused_once_ends_nothing(script: Script, tmp_path: Path) -> None:
    """It is said, and tried again."""
    done = script(REFUSED)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("went on\n")
    assert done.stderr.count("The system refuses to start a worker") == 1
    assert [trial.state.name for trial in trials(tmp_path)] == ["COMPLETE"] * 6


FORKS_FEW = """
really = os.fork

def fork():
    caller = sys._getframe(1)
    if caller.f_code.co_name == "_fork" and len(caller.f_locals["self"]._children) >= 3:
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return really()

os.fork = fork
"""


def test_trials_take_turns_in_the_few_processes_that_can_be_forked(
    script: Script, tmp_path: Path
) -> None:
    """Parked ones go to disk: else all would hold their processes, and wait for further ones."""
    code = SUSPENDED.replace('n_trials=2, devices="cpu:2"', 'n_trials=5, devices="cpu:1"')
    done = script(FORKS_FEW + code.replace(", show_progress=False", ""))
    assert (done.returncode, done.stdout) == (0, f"{FORKED}\n"), done.stderr
    assert [trial.state.name for trial in trials(tmp_path)] == ["COMPLETE"] * 5
    assert "refuses to start a worker" in done.stderr


BY_NAME = """
import multiprocessing, pickle

class Net:
    pass

def work(x):
    return x + 1

def objective(trial):
    pickle.dumps(Net())
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.map(work, [trial.number])[0]

if __name__ == "__main__":
    with_a_thread()
    optimize(make(), objective, n_trials=2, devices="cpu:1", show_progress=False)
"""


def test_what_a_script_defines_can_be_pickled_in_a_new_python(
    script: Script, tmp_path: Path
) -> None:
    """By its name, as in the script."""
    done = script(BY_NAME)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(THREADS)
    assert [trial.value for trial in trials(tmp_path)] == [1.0, 2.0]


PROCESSES = """
import multiprocessing
from optuna_hermes.workers import _preload
_preload._LIBRARIES["late"] = ("late",)
setting = "as imported"

def by_python_s_fork_server():
    child = multiprocessing.get_context("forkserver").Process(target=os.getpid)
    child.start()
    child.join()
    return child.exitcode

def objective(trial):
    import late
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.Process(target=lambda: theirs.send(setting))
    child.start()
    print(ours.recv(), by_python_s_fork_server())
    child.join()
    return 0.0

if __name__ == "__main__":
    setting = "set"
    multiprocessing.RLock()  # as of a progress bar: it fixes the start method
    by_python_s_fork_server()
    way = sys.argv[1]
    if way == "new server":
        with_a_thread()
    optimize(make(), objective, n_trials=2, devices="cpu:1", show_progress=False)
"""


@pytest.mark.parametrize("way", ["forked", "new server", "new workers"])
def test_processes_of_a_trial_are_forks_as_well(script: Script, tmp_path: Path, way: str) -> None:
    """Those of data loaders, whatever Python's default, and where the script has used that.

    Python's own fork server is another one in each process.
    """
    late = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()"
    (tmp_path / "late.py").write_text(late if way == "new workers" else "")
    done = script(PROCESSES, way)
    assert done.returncode == 0, done.stderr
    logs = list((tmp_path / "study.db.hermes").rglob("output.log"))
    assert [log.read_text() for log in logs] == ["set 0\n"] * 2


BROKEN_OUTPUT = """
def objective(trial):
    if trial.number == 1:
        read, write = os.pipe()
        os.close(read)
        sys.stdout = os.fdopen(write, "w")
        print("for nobody")
        return 1.0
    import time
    for step in range(8):
        time.sleep(0.25)
        print("unit", step, flush=True)
        trial.report(0.0, step)
        trial.should_prune()
    return 0.0

if __name__ == "__main__":
    optimize(make(), objective, n_trials=2, devices="cpu:2")
"""


@pytest.mark.parametrize("way", ["forked", "new Python"])
def test_a_worker_whose_output_is_broken_ends_alone(
    script: Script, tmp_path: Path, way: str
) -> None:
    """It must not return to the loop of the server that it is a fork of, which ends all workers."""
    code = BROKEN_OUTPUT
    if way == "new Python":
        code = code.replace("    optimize(", "    with_a_thread()\n    optimize(")
    done = script(code)
    assert done.returncode == 0, done.stderr
    assert "lost its process" not in done.stderr
    assert [trial.state.name for trial in trials(tmp_path)] == ["COMPLETE"] * 2
    logs = sorted((tmp_path / "study.db.hermes").rglob("output.log"))
    assert logs[0].read_text().count("unit") == 8


LEFT_BEHIND = """
import signal, subprocess, time

def objective(trial):
    trial.report(0.0, 0)
    subprocess.Popen(["sh", "-c", "echo $$ >> children; sleep 600 & echo $! >> children; wait"])
    while not os.path.exists("children") or len(open("children").readlines()) < 2:
        time.sleep(0.01)
    with open("children", "a") as file:  # one that leaves the process group, as `timeout` does
        print(subprocess.Popen(["sleep", "600"], preexec_fn=os.setpgrp).pid, file=file)
    if HOW in ("killed", "left") and not os.path.exists("once"):
        open("once", "w").close()
        os.kill(os.getpid(), 9) if HOW == "killed" else os._exit(1)
    if HOW == "stopped":
        os.kill(SCRIPT, signal.SIGTERM)
        time.sleep(600)
    return 0.0

if __name__ == "__main__":
    SCRIPT = os.getpid()
    optimize(make(), objective, n_trials=1, devices="cpu:1", grace=1, show_progress=False)
"""


@pytest.mark.parametrize("how", ["killed", "left", "stopped"])
def test_what_a_killed_worker_has_begun_ends_with_it(
    script: Script, tmp_path: Path, wait_for: Callable[..., Any], how: str
) -> None:
    """A training in a program of its own would train on beside the next trial."""
    script(f"HOW = {how!r}\n" + LEFT_BEHIND)
    begun = [int(pid) for pid in (tmp_path / "children").read_text().split()]
    assert len(begun) >= 3
    wait_for(lambda: not any(map(_is_alive, begun[:3])), 30)


def test_what_a_worker_leaves_that_ends_itself_stays(script: Script, tmp_path: Path) -> None:
    """Pools and servers may be meant to outlive a trial."""
    done = script("HOW = 'ended'\n" + LEFT_BEHIND)
    assert done.returncode == 0, done.stderr
    begun = [int(pid) for pid in (tmp_path / "children").read_text().split()]
    try:
        assert all(psutil.pid_exists(pid) for pid in begun)
    finally:
        for pid in begun:
            os.kill(pid, signal.SIGKILL)


OF_ANOTHER = """
import subprocess, time
import psutil

def objective(trial):
    if trial.number == 1:
        wait_for("helper")
        if not os.path.exists("killed"):
            open("killed", "w").close()
            os.kill(os.getpid(), 9)
        open("again", "w").close()
        return 0.0
    # The shell has ended, so that the helper is a child of the process that reaps.
    subprocess.run(["sh", "-c", "sleep 600 > /dev/null 2>&1 & echo $! > pid; mv pid helper"])
    wait_for("again")
    helper = psutil.Process(int(open("helper").read()))
    return float(helper.status() != psutil.STATUS_ZOMBIE)

def wait_for(path):
    while not os.path.exists(path):
        time.sleep(0.01)

if __name__ == "__main__":
    optimize(make(), objective, n_trials=2, devices="cpu:2", show_progress=False)
"""


def test_what_another_trial_has_begun_outlives_a_killed_worker(
    script: Script, tmp_path: Path
) -> None:
    """A server that its objective started by a shell, for example."""
    try:
        done = script(OF_ANOTHER)
        assert done.returncode == 0, done.stderr
        assert [trial.value for trial in trials(tmp_path)] == [1.0, 0.0], done.stderr
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int((tmp_path / "helper").read_text()), signal.SIGKILL)


CHILDREN = """
import io, multiprocessing, sys, time

def loop():
    time.sleep(600)

class Slow(io.StringIO):
    def flush(self):
        time.sleep(0.5)

def objective(trial):
    sys.stdout = Slow()  # flushed as the last: the script's end comes before the worker's
    child = multiprocessing.get_context("fork").Process(target=loop, daemon=DAEMON)
    child.start()
    with open("child", "w") as file:
        file.write(str(child.pid))
    return 0.0

if __name__ == "__main__":
    optimize(make(), objective, n_trials=1, devices="cpu:1", show_progress=False)
"""


@pytest.mark.parametrize("daemon", [True, False])
def test_children_of_a_trial_hold_no_pipe_of_the_script(
    script: Script, tmp_path: Path, wait_for: Callable[..., Any], daemon: bool
) -> None:
    """Daemons end with their trial, as at Python's exit; others may stay, and hold up nobody."""
    done = script(f"DAEMON = {daemon}\n" + CHILDREN)  # to the end of its output
    assert done.returncode == 0, done.stderr
    child = int((tmp_path / "child").read_text())
    if daemon:
        wait_for(lambda: not _is_alive(child), 30)
    else:
        assert _is_alive(child)
        os.kill(child, signal.SIGKILL)


def _is_alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


IN_CHILDREN = """
import multiprocessing

def report(trial):
    trial.report(2.0, 1)

def ask(trial, answers):
    answers.put(trial.should_prune())

def objective(trial):
    trial.report(1.0, 0)
    trial.should_prune()  # from here on a thread writes
    child = multiprocessing.get_context("fork").Process(target=report, args=(trial,))
    child.start()
    child.join()
    spawn = multiprocessing.get_context("spawn")
    answers = spawn.Queue()
    child = spawn.Process(target=ask, args=(trial, answers))
    child.start()
    assert answers.get(timeout=60) is False
    child.join()
    return float(child.exitcode)

if __name__ == "__main__":
    optimize(make(), objective, n_trials=1, devices="cpu:1", show_progress=False)
"""


def test_processes_of_an_objective_may_use_its_trial(script: Script, tmp_path: Path) -> None:
    """Forked or spawned ones are on the trial's device: they report, and wait for no other."""
    done = script(IN_CHILDREN)
    assert done.returncode == 0, done.stderr
    (trial,) = trials(tmp_path)
    assert (trial.value, trial.intermediate_values) == (0.0, {0: 1.0, 1: 2.0})


AFTERWARDS = """
def constraints(trial):
    raise ERROR("no constraint")

def objective(trial):
    return trial.suggest_float("x", 0.0, 1.0)

if __name__ == "__main__":
    study = make()
    study.sampler = HermesSampler(optuna.samplers.TPESampler(constraints_func=constraints))
    optimize(study, objective, n_trials=2, devices="cpu:1")
"""


@pytest.mark.parametrize("error", ["RuntimeError", "TypeError"])
def test_an_error_after_a_trial_s_end_is_not_a_lost_process(
    script: Script, tmp_path: Path, error: str
) -> None:
    """Optuna has stored the value before it asks the sampler for constraints."""
    done = script(AFTERWARDS.replace("ERROR", error))
    assert done.returncode == 0, done.stderr
    assert [trial.state.name for trial in trials(tmp_path)] == ["COMPLETE"] * 2
    assert done.stderr.count(f"its sampler raised {error}('no constraint')") == 1
    assert "lost its process" not in done.stderr


SPLIT = """
import numpy as np

def objective(trial):
    with open(f"split-{trial.number}", "a") as file:
        print(np.random.default_rng().permutation(1000)[:5].tolist(), file=file)
    if trial.number == 0 and not os.path.exists("once"):
        open("once", "w").close()
        os.kill(os.getpid(), 9)
    return 0.0

if __name__ == "__main__":
    optimize(make(), objective, n_trials=2, devices="cpu:1", show_progress=False)
"""


def test_a_split_without_a_seed_is_the_same_in_the_next_process(
    script: Script, tmp_path: Path
) -> None:
    """Else a trial that comes back would validate on what it was trained on."""
    done = script(SPLIT)
    assert done.returncode == 0, done.stderr
    first, again = (tmp_path / "split-0").read_text().splitlines()
    assert first == again
    assert (tmp_path / "split-1").read_text().splitlines() != [first]


OF_IMPORT = """
import signal, subprocess
NOWHERE = subprocess.DEVNULL
SERVER = subprocess.Popen(["sleep", "600"], stdout=NOWHERE, stderr=NOWHERE)
with open("server", "w") as file:
    file.write(str(SERVER.pid))

def objective(trial):
    if trial.number == 0 and not os.path.exists("once"):
        open("once", "w").close()
        os.kill(os.getpid(), 9)
    os.kill(int(open("server").read()), 0)
    return 0.0
"""


def test_what_the_import_has_begun_outlives_a_killed_worker(script: Script, tmp_path: Path) -> None:
    """A server of data for all trials, for example."""
    run = "optimize(make(), 'objective.py:objective', 2, devices='cpu:1', show_progress=False)"
    (tmp_path / "objective.py").write_text("import os\n" + OF_IMPORT)
    try:
        done = script(f'if __name__ == "__main__":\n    {run}\n')
        assert done.returncode == 0, done.stderr
        assert [trial.state.name for trial in trials(tmp_path)] == ["COMPLETE"] * 2, done.stderr
    finally:
        os.kill(int((tmp_path / "server").read_text()), signal.SIGKILL)
