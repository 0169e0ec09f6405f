"""``benchmarks/chaos.py``: its detectors detect, and a short storm breaks no promise."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from optuna_hermes.ledger import LeaseRecord
from support.benchmarks import BENCHMARKS, benchmark

HOLD = """
import sys
from pathlib import Path
from _chaos_records import Marker, Records

Marker(Records(Path(sys.argv[1])), 3).take("cpu:0")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def records(tmp_path: Path) -> Any:
    module = benchmark("_chaos_records")
    records = module.Records(tmp_path / "records")
    records.prepare(module.Setting(epochs=2, width=8, batch_size=4), pace_seconds=0.5)
    return records


def test_a_device_with_two_holders_is_seen(records: Any, tmp_path: Path) -> None:
    """Whoever finds the marker taken says by whom; a holder that was killed holds nothing."""
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "records")],
        cwd=BENCHMARKS,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert other.stdout is not None
    with other:
        assert other.stdout.readline() == b"held\n"
        assert records.holders() == {other.pid: 3}
        marker = benchmark("_chaos_records").Marker(records, 4)
        marker.take("cpu:0")
        (double,) = records.doubles()
        assert double["pid"] == os.getpid()
        assert (double["trial"], double["other"]) == (4, f"{other.pid} 3")
        marker.take("cpu:1")
        assert records.holders() == {other.pid: 3, os.getpid(): 4}
        marker.leave()
        other.kill()
        other.stdout.read()  # it has begun to end
        marker.take("cpu:0")
    assert records.holders() == {os.getpid(): 4}
    marker.leave()
    assert records.holders() == {}
    assert len(records.doubles()) == 1


def lease(epoch: int, started: float, ended: float | None, device: str = "h/cpu:0") -> LeaseRecord:
    return LeaseRecord(
        study="s", epoch=epoch, number=1, devices=(device,), host="h", started=started, ended=ended
    )


@pytest.mark.parametrize(
    ("leases", "count"),
    [
        ([lease(1, 0, 1), lease(2, 1, 2), lease(3, 2, None)], 0),
        ([lease(1, 0, None), lease(2, 1, 2, "h/cpu:1")], 0),
        ([lease(1, 0, 1.5), lease(2, 1, 2)], 1),
        ([lease(2, 1, 2), lease(1, 0, None)], 1),
        ([lease(1, 0, 5), lease(2, 1, 2), lease(3, 3, 4)], 2),
    ],
)
def test_leases_that_overlap_are_seen(leases: list[LeaseRecord], count: int) -> None:
    """Intervals may touch; every lease that began within another one of its device counts."""
    assert len(list(benchmark("_chaos_verdict").overlaps(leases))) == count


def test_what_is_lost_or_trained_again_is_seen(records: Any) -> None:
    """A value that differs in its last bit is lost; going back costs units, and a damaged file one.

    The values of the study are those of the record but for one.
    """
    verdict = benchmark("_chaos_verdict")
    for trial, unit in [(0, 1), (1, 1), (0, 2), (0, 1), (0, 2), (0, 3), (0, 2)]:
        records.add(trial, unit, 0.1 * unit)
    lines = records.reported()
    assert [line.value for line in lines[:2]] == [(0.1).hex()] * 2
    came = {
        0: {"values": {unit: (0.1 * unit).hex() for unit in (1, 2, 3)}},
        1: {"values": {1: (0.1 + 1e-17 * 2).hex()}},
    }
    assert [line.trial for line in verdict.lost(lines, came)] == [1]
    assert len(verdict.lost(lines, {0: came[0]})) == 1
    assert [units for _, units in verdict.repeated(lines, [])] == [2, 2]
    damaged = [(0, (lines[2].at + lines[3].at) / 2), (1, time.time())]
    assert [units for _, units in verdict.repeated(lines, damaged)] == [1, 2]


def test_batches_that_are_trained_again_are_seen(records: Any) -> None:
    """Going back behind the last batch is a line, and needless if no process was ended then."""
    for unit, index in [(1, 0), (1, 1), (2, 0), (1, 1), (2, 0)]:
        records.batch(5, unit, index, per_unit=2)
    records.batch(6, 1, 0, per_unit=2)
    (line,) = records.rewinds()
    assert (line.trial, line.unit, line.batches) == (5, 1, 2)
    fault = benchmark("_chaos_scene").Fault
    needless = benchmark("_chaos_verdict").needless
    during = {"began": line.last_at, "ended": line.at, "settle_seconds": 0.0}
    later = {"began": line.at + 1, "ended": line.at + 2, "settle_seconds": 0.0}
    assert list(needless([line], [])) == [line]
    assert list(needless([line], [fault(kind="worker-kill", **during)])) == []
    assert list(needless([line], [fault(kind="worker-kill", **later)])) == [line]
    assert list(needless([line], [fault(kind="group-term", **during)])) == [line]


OBEY = """
import sys
from pathlib import Path
from _chaos_orders import Orders

orders = Orders(Path(sys.argv[1]))
orders.obey(3, "validation")
orders.obey(3, "batch")
while len(sys.argv) > 2:
    pass
print("alive")
"""


@pytest.mark.parametrize(
    ("order", "waits", "status"),
    [
        ({"deed": "os._exit", "status": 10}, False, 10),
        ({"deed": "alarm", "seconds": 0.01}, True, -signal.SIGALRM),
        ({"deed": "segfault"}, False, -signal.SIGSEGV),
        ({"deed": "abort"}, False, -signal.SIGABRT),
        ({"deed": "grow"}, False, -signal.SIGKILL),
        ({"deed": "sleep", "seconds": 0.01}, False, 0),
        ({"deed": "block", "seconds": 1}, False, 0),
    ],
    ids=lambda value: value["deed"] if isinstance(value, dict) else None,
)
def test_a_trial_obeys_an_order_once(
    records: Any,
    tmp_path: Path,
    order: dict[str, Any],
    waits: bool,
    status: int,
) -> None:
    """It ends as it was told to, or goes on; who obeys a second time finds no order."""
    module = benchmark("_chaos_orders")
    orders = module.Orders(records.folder)
    orders.prepare()
    orders.give(3, module.Order(where="batch", **order))
    command = [sys.executable, "-c", OBEY, str(records.folder)]
    ended = subprocess.run([*command, *["and wait"] * waits], cwd=BENCHMARKS, capture_output=True)
    assert ended.returncode == status
    assert {line.trial for line in orders.obeyed()} == {3}
    assert [line.over for line in orders.obeyed()] == (
        [False, True] if status == 0 or waits else [False]
    )
    assert not orders.withdraw(3)
    again = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, check=True)
    assert again.stdout == b"alive\n"


def test_the_kernel_kills_who_outgrows_a_small_memory(records: Any) -> None:
    """A process that grows in the group is killed; nothing is left of the group."""
    orders = benchmark("_chaos_orders")
    with benchmark("_chaos_memory").SmallMemory() as memory:
        if not memory.procs:
            pytest.skip("this user may make no control group")
        order = orders.Order(deed="grow", where="batch", procs=memory.procs)
        orders.Orders(records.folder).prepare()
        orders.Orders(records.folder).give(3, order)
        command = [sys.executable, "-c", OBEY, str(records.folder)]
        assert subprocess.run(command, cwd=BENCHMARKS).returncode == -signal.SIGKILL
        group = Path(memory.procs).parent
        counts = [group / "memory.oom_control", group / "memory.events"]  # versions 1 and 2
        assert any("oom_kill 1\n" in each.read_text() for each in counts if each.exists())
    assert not group.exists()


def test_a_disk_refuses_to_be_written(tmp_path: Path) -> None:
    """Read-only or immutable, nobody adds a file to it, not even root; afterwards all is well."""
    with benchmark("_chaos_disk").SmallDisk(tmp_path / "disk") as disk:
        if not (disk.can_fill and disk.can_lock):
            pytest.skip("this user may not mount a tmpfs, or make files immutable")
        (disk.folder / "trial").mkdir()
        for refuse, allow, number in [
            (disk.mount_read_only, disk.unmount_read_only, errno.EROFS),
            (disk.lock, disk.unlock, errno.EPERM),
        ]:
            refuse()
            with pytest.raises(OSError, match=os.strerror(number)):
                (disk.folder / "trial" / "file").write_text("text")
            allow()
            (disk.folder / "trial" / "file").write_text("text")


KINDS = {
    *("worker-kill", "broker-stop", "broker-workers-kill", "group-term", "trial-exit"),
    *("trial-memory", "disk-full", "folder-read-only", "folder-immutable", "checkpoint"),
    *("postgres-stop", "postgres-crowd"),
}
"""Of the short storm: each once, if it can be had here."""


def chaos(*options: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "chaos.py"), *options]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=cwd, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            out, err = process.communicate()
        except BaseException:
            process.terminate()  # killed, it could not end what it has started
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@pytest.mark.slow
@pytest.mark.timeout(600)  # a minute and a half where nothing else runs
def test_a_short_storm_breaks_no_promise(tmp_path: Path) -> None:
    """Twelve faults: every trial completes with the values that it has when left alone."""
    pytest.importorskip("pgserver", reason="needs pgserver: pip install pgserver")
    options = ("--minutes=1", f"--faults={len(KINDS)}", f"--kinds={','.join(sorted(KINDS))}")
    done = chaos(*options, "--seed=0", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    kinds = result["by_kind"]
    assert sum(kinds.values()) == result["faults"] == len(KINDS), done.stderr
    assert set(kinds) == KINDS - set(result["left_out"])
    assert result["trials"] == result["completed"] == 24
    assert result["values_lost"] == 0 < result["values_reported"]
    assert result["units_repeated_max"] <= 1
    assert result["double_holders"] == 0
    assert result["batches_repeated"] == result["killed_in_silence"] == []
    assert result["values_equal"] is True


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--minutes=0", "--minutes must be above 0 but got 0."),
        ("--faults=0", "--faults must be at least 1 but got 0."),
        ("--kinds=worker-kill,earthquake", "but got earthquake."),
    ],
)
def test_bad_options_are_said(
    option: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line names what is wrong, with status 2, and nothing is started."""
    main = benchmark("chaos").main
    monkeypatch.setattr(sys, "argv", ["chaos.py", option])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(message)
