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
from pathlib import Path
from typing import Any

import pytest

FAKE_NVML = r"""
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GIB (1ULL << 30)
enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, NO_DRIVER = 9,
       GPU_IS_LOST = 15 };

typedef struct { const char *uuid; int parent; } device;
typedef struct { unsigned long long total, free, used; } memory_v1;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_v2;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu, compute; } process;

static device gpus[] = {{"GPU-aaaa", -1}, {"GPU-bbbb", -1}};
static device slice = {"MIG-cccc", 1};

/* What the host is like: a word in FAKE_NVML switches a trait on. */
static int has(const char *trait) {
    const char *traits = getenv("FAKE_NVML");
    return traits && strstr(traits, trait) != NULL;
}
static int second(const device *d) { return d == &gpus[1]; }

int nvmlInitWithFlags(unsigned flags) { return has("no-driver") ? NO_DRIVER : OK; }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { return "an error"; }

int nvmlDeviceGetCount_v2(unsigned *count) {
    if (has("no-count")) return NO_DRIVER;
    *count = has("no-gpu") ? 0 : 2;
    return OK;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, device **out) {
    if (index > 1) return INVALID;
    if (index == 1 && has("lost")) return GPU_IS_LOST;
    *out = &gpus[index];
    return OK;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, device **out) {
    for (int i = 0; i < 2; i++)
        if (!strcmp(uuid, gpus[i].uuid)) {
            if (i == 1 && has("lost")) return GPU_IS_LOST;
            *out = &gpus[i];
            return OK;
        }
    if (has("mig") && !strcmp(uuid, slice.uuid)) { *out = &slice; return OK; }
    return NOT_FOUND;
}
int nvmlDeviceGetUUID(device *d, char *out, unsigned size) {
    snprintf(out, size, "%s", d->uuid);
    return OK;
}
int nvmlDeviceGetMigMode(device *d, unsigned *current, unsigned *pending) {
    if (!has("mig")) return NOT_SUPPORTED;
    *current = *pending = second(d);
    return OK;
}
int nvmlDeviceGetMaxMigDeviceCount(device *d, unsigned *count) { *count = 7; return OK; }
int nvmlDeviceGetMigDeviceHandleByIndex(device *d, unsigned index, device **out) {
    if (index != 3) return NOT_FOUND;
    *out = &slice;
    return OK;
}
int nvmlDeviceGetMemoryInfo_v2(device *d, memory_v2 *info) {
    if (second(d) && has("broken")) return GPU_IS_LOST;
    if (has("old-driver") || (second(d) && has("no-memory"))) return NOT_SUPPORTED;
    info->total = 80 * GIB; info->reserved = 1 * GIB; info->free = 60 * GIB;
    info->used = 19 * GIB;
    return OK;
}
int nvmlDeviceGetMemoryInfo(device *d, memory_v1 *info) {
    if (second(d) && has("no-memory")) return NOT_SUPPORTED;
    info->total = 80 * GIB; info->free = 59 * GIB; info->used = 21 * GIB;
    return OK;
}
int nvmlDeviceGetComputeRunningProcesses_v3(device *d, unsigned *count, process *out) {
    unsigned n = has("foreign") && second(d) ? 2 : 0;
    if (has("no-processes") && second(d)) return NOT_SUPPORTED;
    if (*count < n) { *count = n; return TOO_SMALL; }
    *count = n;
    if (n) {
        memset(out, 0, n * sizeof *out);
        out[0].pid = 4242; out[0].used = 3 * GIB;
        out[1].pid = 4343; out[1].used = (unsigned long long)-1;
    }
    return OK;
}
"""

PREAMBLE = """
import dataclasses, json
from optuna_hermes.broker._devices import Devices, NvmlDevices, parse_devices
from optuna_hermes.errors import DeviceSpecError

def ids(spec):
    try:
        return [slot.id for slot in parse_devices(spec)]
    except DeviceSpecError as error:
        return str(error)

def poll(spec, own_pids=()):
    source = Devices(parse_devices(spec), host="here")
    devices = [dataclasses.asdict(device) for device in source.poll(own_pids)]
    source.close()
    return devices

print(json.dumps(%s))
"""

GIB = 2**30


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the compiled library."""
    compiler = shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs gcc on Linux to compile a stand-in for the NVIDIA library")
    folder = tmp_path_factory.mktemp("nvml")
    source = folder / "nvml.c"
    source.write_text(FAKE_NVML)
    command = [compiler, "-shared", "-fPIC", "-o", str(folder / "libnvidia-ml.so.1"), str(source)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return folder


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
        "free": True,
        "memory_bytes": 80 * GIB,
        "memory_free_bytes": 60 * GIB,
        "problem": "",
    }
    return device | fields


def test_auto_is_every_gpu(library: Path) -> None:
    """``auto`` names all GPUs by UUID, and polls find them healthy, free and with their memory."""
    assert on_host(library, "", "ids('auto')") == ["GPU-aaaa", "GPU-bbbb"]
    assert on_host(library, "", "poll('auto')") == [gpu("GPU-aaaa"), gpu("GPU-bbbb")]


def test_a_mixed_list_keeps_its_order(library: Path) -> None:
    """GPUs and CPU slots are polled together in the order in which they were named."""
    devices = on_host(library, "", "poll('GPU-bbbb,cpu:2,GPU-aaaa')")
    assert [device["id"] for device in devices] == ["GPU-bbbb", "cpu:0", "cpu:1", "GPU-aaaa"]


def test_an_unknown_gpu_is_refused_with_those_there_are(library: Path) -> None:
    """The error lists the GPUs of the host, or says that it has none."""
    assert on_host(library, "", "ids('cpu:1,GPU-zzzz')") == (
        "--devices must name devices of this host but got GPU-zzzz; choose from GPU-aaaa, GPU-bbbb."
    )
    assert on_host(library, "no-gpu", "ids('GPU-zzzz')") == (
        "--devices must name devices of this host but got GPU-zzzz; "
        "choose from cpu:N, for it has no GPU."
    )


def test_a_driver_without_gpus_means_cpu_slots(library: Path) -> None:
    """``auto`` falls back to CPU slots where a driver is installed but no GPU."""
    assert on_host(library, "no-gpu", "ids('auto')") == ["cpu:0", "cpu:1"]


@pytest.mark.parametrize("trait", ["no-driver", "no-count"])
def test_a_driver_that_does_not_run(library: Path, trait: str) -> None:
    """A library without its driver is a CPU host to ``auto``, and an error for a GPU by name."""
    assert on_host(library, trait, "ids('auto')") == ["cpu:0", "cpu:1"]
    assert on_host(library, trait, "ids('GPU-aaaa')") == (
        "A GPU needs a working NVIDIA driver but got 'GPU-aaaa' and NVML says "
        "'Driver Not Loaded'; install the driver, or use cpu:2."
    )


def test_a_gpu_that_computes_for_a_stranger_is_not_free(library: Path) -> None:
    """One process that is not ours takes the GPU, the others stay as they are."""
    devices = on_host(library, "foreign", "poll('auto', own_pids=[4242])")
    assert devices == [gpu("GPU-aaaa"), gpu("GPU-bbbb", free=False)]


def test_a_gpu_that_computes_for_our_runs_is_free_of_strangers(library: Path) -> None:
    """Processes of the broker's own runs do not count as strangers."""
    devices = on_host(library, "foreign", "poll('auto', own_pids=[4242, 4343, 1])")
    assert devices == [gpu("GPU-aaaa"), gpu("GPU-bbbb")]


def test_memory_of_a_process(library: Path) -> None:
    """A process has its bytes; sizes that NVML withholds and processes it lists not are unknown."""
    expression = "[NvmlDevices(['GPU-bbbb']).memory_of(pid, 'GPU-bbbb') for pid in (4242, 4343, 1)]"
    assert on_host(library, "foreign", expression) == [3 * GIB, None, None]
    unlisted = "NvmlDevices(['GPU-bbbb']).holders('GPU-bbbb')"
    assert on_host(library, "no-processes", unlisted) is None
    assert on_host(library, "", unlisted) == {}


def test_memory_that_is_not_supported_is_unknown(library: Path) -> None:
    """A GPU that does not tell its memory has None and not 0, and can be used all the same."""
    devices = on_host(library, "no-memory", "poll('auto')")
    assert devices[1] == gpu("GPU-bbbb", memory_bytes=None, memory_free_bytes=None)


def test_processes_that_are_not_supported_are_not_nobody(library: Path) -> None:
    """A GPU whose processes cannot be listed is not free: nobody knows who is on it."""
    devices = on_host(library, "no-processes", "poll('auto')")
    assert devices == [gpu("GPU-aaaa"), gpu("GPU-bbbb", free=False)]


def test_an_old_driver_tells_memory_the_old_way(library: Path) -> None:
    """Where version 2 of the memory call is missing, version 1 is asked."""
    devices = on_host(library, "old-driver", "poll('GPU-aaaa')")
    assert devices == [gpu("GPU-aaaa", memory_free_bytes=59 * GIB)]


@pytest.mark.parametrize("trait", ["lost", "broken"])
def test_a_gpu_that_cannot_be_read_is_not_healthy(library: Path, trait: str) -> None:
    """A GPU that fails is left out by ``auto``, and found broken by a poll that goes on."""
    assert on_host(library, trait, "ids('auto')") == ["GPU-aaaa"]
    expression = "[(d.healthy, d.free) for d in NvmlDevices(['GPU-aaaa', 'GPU-bbbb']).poll()]"
    assert on_host(library, trait, expression) == [[True, True], [False, False]]


def test_slices_stand_for_a_gpu_in_mig_mode(library: Path) -> None:
    """Of a GPU in MIG mode the slices can be used, and the GPU itself cannot."""
    assert on_host(library, "mig", "ids('auto')") == ["GPU-aaaa", "MIG-cccc"]
    assert on_host(library, "mig", "poll('MIG-cccc')") == [gpu("MIG-cccc")]
    assert on_host(library, "mig", "ids('GPU-bbbb')").endswith("choose from GPU-aaaa, MIG-cccc.")


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


def test_trials_see_the_gpu_they_were_granted_and_no_other(library: Path, tmp_path: Path) -> None:
    """A study runs on two GPUs: each trial's process is shown its own by UUID."""
    script = tmp_path / "study.py"
    script.write_text(STUDY)
    done = subprocess.run(
        [sys.executable, str(script), "GPU-aaaa,GPU-bbbb"],
        cwd=tmp_path,
        env={**os.environ, "LD_LIBRARY_PATH": str(library)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    devices, states, visible = json.loads(done.stdout)
    assert devices == ["GPU-aaaa", "GPU-bbbb"]
    assert states == ["COMPLETE"] * 6
    assert set(visible) == {"GPU-aaaa", "GPU-bbbb"}
