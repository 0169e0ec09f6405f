"""The real NVML binding against a library that plays a host with GPUs.

The binding opens ``libnvidia-ml.so.1`` by name, so a small library of that name on the loader's
path is a driver to it. Each case runs in a process of its own, for a process loads it once.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

PREAMBLE = """
import ctypes, dataclasses, json, logging
from optuna_hermes.broker._devices import _health
from optuna_hermes.broker._devices._nvml import NvmlDevices
from optuna_hermes.broker._devices._source import Devices, parse_devices
from optuna_hermes.broker._devices._visible import hidden
from optuna_hermes.errors import DeviceSpecError

libc = ctypes.CDLL(None)

def later(seconds):
    _health.LOST_SECONDS = seconds

def story(*words):
    source = NvmlDevices(["MIG-cccc" if "mig" in words[0] else "GPU-bbbb"])
    seen = []
    for each in words:
        libc.setenv(b"FAKE_NVML", each.encode(), 1)
        (device,), xids = source.poll()
        codes = [xid.code for xid in xids]
        seen.append([device.healthy, device.lost, device.problem, codes])
    return seen

def ids(spec):
    try:
        return [slot.id for slot in parse_devices(spec)]
    except DeviceSpecError as error:
        return str(error)

class Kept(logging.Handler):
    def emit(self, record):
        logged.append(record.getMessage())

logged = []
logging.getLogger().addHandler(Kept())

def poll(spec, own_pids=(), named=True):
    source = Devices(parse_devices(spec), host="here", named=named)
    devices = [dataclasses.asdict(device) for device in source.poll(own_pids).devices]
    source.close()
    return devices

print(json.dumps(%s))
"""

GIB = 2**30
STRANGER = "computes on it: wait for it, or end it"


def on_host(library: Path, traits: str, expression: str) -> Any:
    """The value of an expression in a new process on a host with these traits."""
    environment = os.environ | {"LD_LIBRARY_PATH": str(library), "FAKE_NVML": traits}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PREAMBLE % expression],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def gpu(uuid: str, **fields: Any) -> dict[str, Any]:
    device = {
        "id": uuid,
        "host": "here",
        "kind": "gpu",
        "healthy": True,
        "lost": False,
        "free": True,
        "unlisted": True,
        "exclusive": False,
        "part": uuid.startswith("MIG-"),
        "shown_by": ["CUDA_VISIBLE_DEVICES", uuid],
        "memory_bytes": 80 * GIB,
        "memory_free_bytes": 79 * GIB,
        "processes": [],
        "problem": "",
        "powered": True,
        "power_watts": None,
        "energy_joules": None,
        "used": None,
    }
    return device | fields


@pytest.mark.parametrize(
    ("named", "traits", "expected"),
    [
        ("1", "", ["GPU-bbbb"]),
        ("1,0", "", ["GPU-bbbb", "GPU-aaaa"]),
        ("GPU-bbbb", "", ["GPU-bbbb"]),
        ("GPU-b", "", ["GPU-bbbb"]),
        ("MIG-cccc", "mig", ["MIG-cccc"]),
        ("MIG-c,0", "mig", ["MIG-cccc", "GPU-aaaa"]),
        ("0,-1,1", "", ["GPU-aaaa"]),
        ("", "", ["cpu:0", "cpu:1"]),
        ("-1", "", ["cpu:0", "cpu:1"]),
        ("NoDevFiles", "", ["cpu:0", "cpu:1"]),
        ("7", "", ["cpu:0", "cpu:1"]),
        ("1", "lost", ["cpu:0", "cpu:1"]),
    ],
)
def test_auto_is_what_cuda_may_see(
    nvml_library: Path,
    monkeypatch: pytest.MonkeyPatch,
    named: str,
    traits: str,
    expected: list[str],
) -> None:
    """``CUDA_VISIBLE_DEVICES`` bounds ``auto`` as it bounds CUDA, down to none."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert on_host(nvml_library, traits, "ids('auto')") == expected


def test_a_gpu_that_is_named_is_used_whatever_cuda_may_see_here(
    nvml_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that is named is used; a broker of others' GPUs is told from one's own."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert on_host(nvml_library, "", "ids('GPU-bbbb')") == ["GPU-bbbb"]
    asked = "[hidden(['GPU-bbbb']), hidden(['GPU-aaaa', 'GPU-bbbb']), hidden(['cpu:0'])]"
    assert on_host(nvml_library, "", asked) == [True, False, False]


def test_auto_is_every_gpu(nvml_library: Path) -> None:
    """``auto`` names all GPUs by UUID, and polls find them healthy, free and with their memory."""
    assert on_host(nvml_library, "", "ids('auto')") == ["GPU-aaaa", "GPU-bbbb"]
    assert on_host(nvml_library, "", "poll('auto')") == [gpu("GPU-aaaa"), gpu("GPU-bbbb")]


def test_energy_is_counted_where_it_can_be(nvml_library: Path) -> None:
    """A GPU tells what it took and may take; one without a counter, or a slice, is no trouble."""
    traits = "energy=123456 watts=700000"
    first, second = on_host(nvml_library, traits, "poll('auto')")
    assert first == gpu("GPU-aaaa", power_watts=700.0)
    assert second == gpu("GPU-bbbb", power_watts=700.0, energy_joules=123.456)
    (mig,) = on_host(nvml_library, f"mig {traits}", "poll('MIG-cccc')")
    assert (mig["healthy"], mig["power_watts"], mig["energy_joules"]) == (True, None, None)


def test_a_mixed_list_keeps_its_order(nvml_library: Path) -> None:
    """GPUs and CPU slots are polled together in the order in which they were named."""
    devices = on_host(nvml_library, "", "poll('GPU-bbbb,cpu:2,GPU-aaaa')")
    assert [device["id"] for device in devices] == ["GPU-bbbb", "cpu:0", "cpu:1", "GPU-aaaa"]


def test_an_unknown_gpu_is_refused_with_those_there_are(nvml_library: Path) -> None:
    """The error lists the GPUs of the host, or says that it has none."""
    assert on_host(nvml_library, "", "ids('cpu:1,GPU-zzzz')") == (
        "--devices must name devices of this host but got GPU-zzzz; choose from GPU-aaaa, GPU-bbbb."
    )
    assert on_host(nvml_library, "no-gpu", "ids('GPU-zzzz')") == (
        "--devices must name devices of this host but got GPU-zzzz; "
        "choose from cpu:N, for it has no GPU."
    )


def test_a_driver_without_gpus_means_cpu_slots(nvml_library: Path) -> None:
    """``auto`` falls back to CPU slots where a driver is installed but no GPU."""
    assert on_host(nvml_library, "no-gpu", "ids('auto')") == ["cpu:0", "cpu:1"]


LOADED = "load the driver with `modprobe nvidia`"
TROUBLES = {
    "no-driver": ("Driver Not Loaded", LOADED),
    "no-count": ("Driver Not Loaded", LOADED),
    "mismatch": (
        "RM has detected an NVML/RM version mismatch.",
        "the driver was updated while an older one is loaded, so restart the host",
    ),
    "no-permission": ("Insufficient Permissions", "let this user read and write /dev/nvidia*"),
    "too-old": ("Function Not Found", "the driver is too old, so update it"),
    "unknown-error": ("Unknown Error", "see what `nvidia-smi` says"),
}


@pytest.mark.parametrize("trait", TROUBLES)
def test_a_driver_that_does_not_run(nvml_library: Path, trait: str) -> None:
    """A library without a driver that fits is an error for a GPU by name, with what to do.

    To ``auto`` it is a CPU host, and the broker's log says why.
    """
    says, way_out = TROUBLES[trait]
    message = f"needs a working NVIDIA driver but NVML says '{says}': {way_out}, or use cpu:N."
    assert on_host(nvml_library, trait, "ids('GPU-aaaa')") == f"A GPU (GPU-aaaa) {message}"
    assert on_host(nvml_library, trait, "[ids('auto'), logged]") == [
        ["cpu:0", "cpu:1"],
        [f"auto means cpu:2 here: A GPU {message}"],
    ]


def test_a_gpu_that_computes_for_a_stranger_is_not_free(nvml_library: Path) -> None:
    """One process that is not ours takes the GPU, the others stay as they are."""
    devices = on_host(nvml_library, "foreign", "poll('auto', own_pids=[4242])")
    stranger = gpu(
        "GPU-bbbb",
        free=False,
        unlisted=False,
        processes=[[4242, 3 * GIB]],
        problem=f"process 4343 {STRANGER}",
    )
    assert devices == [gpu("GPU-aaaa"), stranger]


def test_a_stranger_is_described(nvml_library: Path) -> None:
    """Whoever wants the GPU learns which process to ask for, and whose it is."""
    devices = on_host(nvml_library, f"pid={os.getpid()}", "poll('GPU-bbbb')")
    me = psutil.Process()
    problem = f"process {me.pid} ({me.name()} of {me.username()}) {STRANGER}"
    taken = {"unlisted": False, "processes": [[me.pid, GIB]]}
    assert devices == [gpu("GPU-bbbb", free=False, problem=problem, **taken)]


def test_what_our_runs_start_is_ours(nvml_library: Path) -> None:
    """A process that one of the broker's clients has started is no stranger."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        expression = f"poll('GPU-bbbb', own_pids=[{os.getpid()}])"
        devices = on_host(nvml_library, f"pid={child.pid}", expression)
        child.communicate(b"\n")
    assert devices == [gpu("GPU-bbbb", unlisted=False, processes=[[child.pid, GIB]])]


def test_a_gpu_that_computes_for_our_trials_is_free_of_strangers(nvml_library: Path) -> None:
    """Processes of the broker's own runs do not count as strangers."""
    devices = on_host(nvml_library, "foreign", "poll('auto', own_pids=[4242, 4343, 1])")
    ours = gpu("GPU-bbbb", unlisted=False, processes=[[4242, 3 * GIB]])
    assert devices == [gpu("GPU-aaaa"), ours]


def test_a_desktop_is_in_nobodys_way(nvml_library: Path) -> None:
    """Processes that only draw are listed, and do not take a GPU."""
    devices = on_host(nvml_library, "desktop", "poll('auto')")
    assert devices == [gpu("GPU-aaaa"), gpu("GPU-bbbb", unlisted=False)]


def test_an_old_driver_lists_processes_the_old_way(nvml_library: Path) -> None:
    """Version 2 of the list is asked for where version 3 is missing."""
    devices = on_host(nvml_library, "old-processes foreign", "poll('auto')")
    assert [device["free"] for device in devices] == [True, False]


def test_memory_of_a_process(nvml_library: Path) -> None:
    """A process has its bytes; one whose bytes NVML withholds is not listed with any."""
    (device,) = on_host(nvml_library, "foreign", "poll('GPU-bbbb')")
    assert device["processes"] == [[4242, 3 * GIB]]


def test_memory_that_is_not_supported_is_unknown(nvml_library: Path) -> None:
    """A GPU that does not tell its memory has None and not 0, and can be used all the same."""
    devices = on_host(nvml_library, "no-memory", "poll('auto')")
    assert devices[1] == gpu("GPU-bbbb", memory_bytes=None, memory_free_bytes=None)


def test_processes_that_are_not_supported_are_not_nobody(nvml_library: Path) -> None:
    """A GPU whose processes cannot be listed is free only if its user named it."""
    named = on_host(nvml_library, "no-processes", "poll('auto')")
    assert named == [gpu("GPU-aaaa"), gpu("GPU-bbbb")]
    found = on_host(nvml_library, "no-processes", "poll('auto', named=False)")
    problem = (
        "its processes cannot be listed here, so it is not known who is on it: name it in "
        "--devices to use it all the same"
    )
    assert found == [gpu("GPU-aaaa"), gpu("GPU-bbbb", free=False, unlisted=False, problem=problem)]


def test_an_old_driver_tells_memory_the_old_way(nvml_library: Path) -> None:
    """Version 1 of the memory call is asked where version 2 is missing."""
    devices = on_host(nvml_library, "old-driver", "poll('GPU-aaaa')")
    assert devices == [gpu("GPU-aaaa", memory_free_bytes=78 * GIB)]


@pytest.mark.parametrize("trait", ["lost", "broken"])
def test_a_gpu_that_cannot_be_read_is_not_healthy(nvml_library: Path, trait: str) -> None:
    """A GPU that fails is left out by ``auto``, and found broken by a poll that goes on."""
    assert on_host(nvml_library, trait, "ids('auto')") == ["GPU-aaaa"]
    devices = "NvmlDevices(['GPU-aaaa', 'GPU-bbbb']).poll().devices"
    expression = f"[(d.healthy, d.free) for d in {devices}]"
    assert on_host(nvml_library, trait, expression) == [[True, True], [False, False]]


LOST = "it cannot be read (GPU is lost): reset it, or restart the host"
UNKNOWN = "it cannot be read (Unknown Error)"
RESET = "end the broker, reset the GPU with `nvidia-smi --gpu-reset` or restart the host"


def test_a_lost_gpu_comes_back_when_it_answers(nvml_library: Path) -> None:
    """It is lost for as long as it does not answer, and as good as before when it does."""
    seen = on_host(nvml_library, "", "story('', 'lost', 'lost', '')")
    lost = [False, True, LOST, []]
    assert seen == [[True, False, "", []], lost, lost, [True, False, "", []]]


def test_one_unknown_error_is_no_loss(nvml_library: Path) -> None:
    """A GPU that answers with another error is not free, and lost only if that goes on."""
    seen = on_host(nvml_library, "", "story('', 'failing', '')")
    unclear = f"{UNKNOWN}: see what `nvidia-smi` says"
    assert seen[1:] == [[True, False, unclear, []], [True, False, "", []]]
    seen = on_host(nvml_library, "", "later(0) or story('failing', 'failing')")
    assert seen[1] == [False, True, f"{UNKNOWN}: reset it, or restart the host", []]


def test_what_a_program_did_is_no_fault_of_the_device(nvml_library: Path) -> None:
    """XIDs of the program are reported once each, and the device stays."""
    codes = [13, 31, 43, 45, 68, 69, 94, 109]
    told = "story('', f'xid={c}', f'xid={c}', f'xid={c} xid=13')"
    stories = on_host(nvml_library, "", f"[{told} for c in {codes}]")
    for code, seen in zip(codes, stories, strict=True):
        assert [each[0] for each in seen] == [True] * 4
        assert [each[3] for each in seen] == [[], [code], [], [13]]


def test_what_a_device_needs_a_reset_for_takes_it_out(nvml_library: Path) -> None:
    """Such XIDs end its service until it was away and is back."""
    codes = [46, 48, 62, 64, 74, 79, 95, 110, 119, 120, 140, 143, 158]
    told = "story('', *[f'xid={c}'] * 2, f'lost xid={c}', '')"
    stories = on_host(nvml_library, "", f"[{told} for c in {codes}]")
    for code, seen in zip(codes, stories, strict=True):
        words = seen[1][2]
        assert words.startswith(f"it reported XID {code} (")
        assert words.endswith(f": {RESET}")
        assert seen[1:] == [
            [False, False, words, [code]],
            [False, False, words, []],
            [False, True, LOST, []],
            [True, False, "", []],
        ]


def test_what_is_no_more_than_a_notice_takes_no_device_out(nvml_library: Path) -> None:
    """Memory that was mended, a changed advice, and numbers that nobody knows cost no device."""
    codes = [63, 92, 154, 999]
    stories = on_host(nvml_library, "", f"[story('', f'xid={{c}}', '') for c in {codes}]")
    for code, seen in zip(codes, stories, strict=True):
        assert seen == [[True, False, "", []], [True, False, "", [code]], [True, False, "", []]]


def test_a_driver_that_knows_what_a_device_needs_is_believed(nvml_library: Path) -> None:
    """If nothing is needed, an XID benches no device; if a reset is, any XID does until then."""
    fine = "recovery=0"
    seen = on_host(nvml_library, fine, f"story('{fine}', 'xid=48 {fine}', '{fine}')")
    assert [each[:3] for each in seen] == [[True, False, ""]] * 3
    bad = "recovery=1"
    seen = on_host(nvml_library, "", f"story('', 'xid=154 {bad}', '{bad}', '{fine}')")
    words = f"its driver says that it has to be reset: {RESET}"
    assert [each[:3] for each in seen] == [
        [True, False, ""],
        [False, False, words],
        [False, False, words],
        [True, False, ""],
    ]


# -- compute modes


def test_a_gpu_for_one_process_is_known_as_such(nvml_library: Path) -> None:
    """It can be granted; the broker sees to it that one process at most is on it."""
    (device,) = on_host(nvml_library, "mode=3", "poll('GPU-bbbb')")
    assert device == gpu("GPU-bbbb", exclusive=True)


def test_a_gpu_for_no_process_is_not_granted(nvml_library: Path) -> None:
    """Its problem says how its user allows it."""
    (device,) = on_host(nvml_library, "mode=2", "poll('GPU-bbbb')")
    words = "its compute mode is Prohibited: allow it with `nvidia-smi --compute-mode=DEFAULT`"
    assert device == gpu("GPU-bbbb", free=False, unlisted=False, problem=words)


@pytest.fixture
def mps_server(tmp_path: Path) -> Iterator[int]:
    """A process with the name of NVIDIA's MPS server, as it is shown to everybody."""
    program = tmp_path / "nvidia-cuda-mps-server"
    shutil.copy(shutil.which("cat") or "/bin/cat", program)
    with subprocess.Popen([program], stdin=subprocess.PIPE) as server:
        yield server.pid
        server.communicate()


def test_an_mps_server_is_no_stranger(nvml_library: Path, mps_server: int) -> None:
    """The GPU is free, and open to several processes whatever its mode: MPS shares it."""
    for mode in ("", "mode=3"):
        (device,) = on_host(nvml_library, f"pid={mps_server} {mode}", "poll('GPU-bbbb')")
        assert device == gpu("GPU-bbbb")


def test_clients_of_an_mps_server_are_the_processes_that_count(
    nvml_library: Path, mps_server: int
) -> None:
    """A client of another user takes the GPU as without MPS; one of ours has its bytes."""
    words = f"pid={mps_server} client=4242"
    (device,) = on_host(nvml_library, words, "poll('GPU-bbbb')")
    taken = {"unlisted": False, "processes": [[4242, 2 * GIB]]}
    assert device == gpu("GPU-bbbb", free=False, problem=f"process 4242 {STRANGER}", **taken)
    (device,) = on_host(nvml_library, words, "poll('GPU-bbbb', own_pids=[4242])")
    assert device == gpu("GPU-bbbb", **taken)
    (device,) = on_host(nvml_library, f"{words} no-clients", "poll('GPU-bbbb')")
    assert device == gpu("GPU-bbbb"), "old drivers do not tell"


def test_a_slice_hears_its_own_reports(nvml_library: Path) -> None:
    """Errors of another slice of the same GPU do not count against this one."""
    said = "'mig instance=4 xid=31', 'mig instance=5 xid=31 xid=43', 'mig xid=1 xid=2 xid=45'"
    seen = on_host(nvml_library, "mig", f"story('mig', {said})")
    assert [each[3] for each in seen] == [[], [], [43], [45]]


def test_a_driver_that_reports_nothing_is_read_all_the_same(nvml_library: Path) -> None:
    """Devices are still polled where events are not supported."""
    seen = on_host(nvml_library, "no-events", "story('no-events', 'no-events lost')")
    assert [each[1] for each in seen] == [False, True]


def test_a_trial_is_not_blamed_for_a_gpu_that_is_lost(nvml_library: Path) -> None:
    """Only an error of CUDA on a device that cannot be used any more is the device's."""
    errors = "RuntimeError('CUDA error: launch failure'), RuntimeError('boo'), ValueError('CUDA')"
    ecc = "RuntimeError('CUDA error: uncorrectable ECC error encountered')"
    blame = "__import__('optuna_hermes.workers._fault').workers._fault.is_of_device"
    blamed = f"[{blame}(error, 'GPU-bbbb') for error in ({errors}, {ecc})]"
    assert on_host(nvml_library, "lost", blamed) == [True, False, False, True]
    assert on_host(nvml_library, "", blamed) == [False, False, False, True]
    assert on_host(nvml_library, "no-driver", blamed) == [True, False, False, True]


def test_slices_stand_for_a_gpu_in_mig_mode(nvml_library: Path) -> None:
    """Of a GPU in MIG mode the slices can be used, and the GPU itself cannot."""
    assert on_host(nvml_library, "mig", "ids('auto')") == ["GPU-aaaa", "MIG-cccc"]
    assert on_host(nvml_library, "mig", "poll('MIG-cccc')") == [gpu("MIG-cccc")]
    assert on_host(nvml_library, "mig", "ids('GPU-bbbb')").endswith(
        "choose from GPU-aaaa, MIG-cccc."
    )


STUDY = """
import json, os, sys
import optuna
from optuna_hermes import HermesPruner, HermesSampler, optimize

def objective(trial):
    x = trial.suggest_float("x", -1, 1)
    trial.set_user_attr("visible", os.environ["CUDA_VISIBLE_DEVICES"])
    for unit in range(1, 6):
        trial.report(x * x + 1 / unit, unit)
        if trial.should_prune():
            raise optuna.TrialPruned
    return x * x

study = optuna.create_study(
    storage="sqlite:///study.db", sampler=HermesSampler(), pruner=HermesPruner()
)
result = optimize(study, objective, n_trials=6, devices=sys.argv[1], show_progress=False)
visible = [trial.user_attrs.get("visible") for trial in study.trials]
print(json.dumps([result.devices, [t.state.name for t in study.trials], visible]))
"""


def test_trials_see_the_gpu_they_were_granted_and_no_other(
    nvml_library: Path, tmp_path: Path
) -> None:
    """A study runs on two GPUs: each trial's process is shown its own by UUID."""
    script = tmp_path / "study.py"
    script.write_text(STUDY)
    done = subprocess.run(
        [sys.executable, str(script), "GPU-aaaa,GPU-bbbb"],
        cwd=tmp_path,
        env={**os.environ, "LD_LIBRARY_PATH": str(nvml_library)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    devices, states, visible = json.loads(done.stdout)
    assert devices == ["GPU-aaaa", "GPU-bbbb"]
    assert states == ["COMPLETE"] * 6
    assert set(visible) == {"GPU-aaaa", "GPU-bbbb"}


def doctor(library: Path, traits: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Return the findings of ``doctor`` on a host with these traits, by name of the check."""
    done = subprocess.run(
        [sys.executable, "-m", "optuna_hermes", "doctor", "--json"],
        env=os.environ | {"LD_LIBRARY_PATH": str(library), "FAKE_NVML": traits},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return {check["name"]: check for check in json.loads(done.stdout)["checks"]}


def test_doctor_says_what_the_driver_says(nvml_library: Path, tmp_path: Path) -> None:
    """Doctor shows what ``auto`` passes over: a driver that does not work, a GPU that is lost."""
    stuck = doctor(nvml_library, "no-driver", tmp_path)
    assert stuck["NVIDIA driver"] == {
        "name": "NVIDIA driver",
        "state": "warn",
        "found": "does not work",
        "hint": "A GPU needs a working NVIDIA driver but NVML says 'Driver Not Loaded': load the "
        "driver with `modprobe nvidia`, or use cpu:N.",
    }
    assert stuck["device cpu:0"]["state"] == "ok"
    lost = doctor(nvml_library, "lost foreign", tmp_path)
    assert lost["GPU 1"] == {
        "name": "GPU 1",
        "state": "warn",
        "found": "GPU is lost",
        "hint": "See `nvidia-smi -i 1`; reset it, or restart the host.",
    }
    assert lost["device GPU-aaaa"]["state"] == "ok"
    assert "NVIDIA driver" not in lost


def test_doctor_says_who_is_on_a_gpu(nvml_library: Path, tmp_path: Path) -> None:
    """A GPU that a stranger uses is healthy, and would not be granted."""
    found = doctor(nvml_library, "foreign", tmp_path)["device GPU-bbbb"]
    assert (found["state"], found["found"]) == ("warn", "healthy, 80.0 GiB")
    assert found["hint"] == f"process 4242 {STRANGER}"
    assert "GPU 1" not in doctor(nvml_library, "", tmp_path)
