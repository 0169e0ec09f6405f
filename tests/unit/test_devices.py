"""The meaning of device specifications, as far as no driver is needed."""

from __future__ import annotations

from dataclasses import replace

import pynvml
import pytest

from optuna_hermes.broker._devices._health import LOST_SECONDS, Health
from optuna_hermes.broker._devices._nvml import NvmlDevices
from optuna_hermes.broker._devices._source import (
    Devices,
    DeviceSlot,
    DeviceSource,
    parse_devices,
)
from optuna_hermes.broker._devices._visible import environment
from optuna_hermes.errors import DeviceSpecError
from optuna_hermes.model import Device
from support.broker import FakeBroker
from support.devices import FakeDevices


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host without the NVIDIA library."""

    def fail() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)


@pytest.fixture
def no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calling NVML is a failure."""
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: pytest.fail("NVML was called"))


def cpu(n_slots: int) -> list[DeviceSlot]:
    return [DeviceSlot(id=f"cpu:{index}", kind="cpu") for index in range(n_slots)]


@pytest.mark.usefixtures("no_nvml")
@pytest.mark.parametrize(("spec", "n_slots"), [("cpu:1", 1), ("cpu:3", 3), (" cpu:12 ", 12)])
def test_cpu_slots_are_counted(spec: str, n_slots: int) -> None:
    """``cpu:N`` is N slots, and no driver is asked for them."""
    assert parse_devices(spec) == cpu(n_slots)


@pytest.mark.usefixtures("no_driver")
def test_auto_without_a_gpu_is_two_cpu_slots() -> None:
    """A host without a driver trains on two CPU slots."""
    assert parse_devices("auto") == cpu(2)


@pytest.mark.usefixtures("no_nvml")
@pytest.mark.parametrize(
    "part", ["", "cpu", "cpu:", "cpu:-1", "cpu:two", "cuda:0", "0", "GPU-", "auto", "gpu-1"]
)
def test_a_part_that_means_nothing_is_refused(part: str) -> None:
    """The error is one line with the rule, the part, and where UUIDs come from."""
    with pytest.raises(DeviceSpecError) as caught:
        parse_devices(f"cpu:1,{part}")
    assert str(caught.value) == (
        "--devices must be auto alone, or a list of cpu:N, GPU-uuid, MIG-uuid and FILE.json, "
        f"but got {part!r}; `nvidia-smi -L` prints the UUIDs."
    )


@pytest.mark.usefixtures("no_nvml")
@pytest.mark.parametrize("spec", ["cpu:0", "cpu:1025"])
def test_a_number_of_slots_has_bounds(spec: str) -> None:
    """No slots, or absurdly many, are refused with the bounds."""
    with pytest.raises(DeviceSpecError, match=f"between 1 and 1024 but got '{spec}'; use"):
        parse_devices(spec)


@pytest.mark.usefixtures("no_nvml")
@pytest.mark.parametrize(
    ("spec", "twice"), [("cpu:1,cpu:2", "cpu:0"), ("GPU-a,cpu:1,GPU-a", "GPU-a")]
)
def test_a_device_is_named_once(spec: str, twice: str) -> None:
    """A device that is named twice is refused, before anybody asks whether it exists."""
    with pytest.raises(DeviceSpecError, match=f"each device once but got {twice} more than once"):
        parse_devices(spec)


@pytest.mark.usefixtures("no_driver")
def test_a_gpu_needs_a_driver() -> None:
    """Without a driver the error names the GPU, what NVML says, and the way out."""
    with pytest.raises(DeviceSpecError) as caught:
        parse_devices("cpu:1,GPU-a")
    assert str(caught.value) == (
        "A GPU (GPU-a) needs a working NVIDIA driver but NVML says 'NVML Shared Library Not "
        "Found': install the driver (a container needs `--gpus all`), or use cpu:N."
    )
    assert isinstance(caught.value.__cause__, pynvml.NVMLError)


@pytest.mark.usefixtures("no_driver")
def test_gpus_cannot_be_polled_without_a_driver() -> None:
    """A driver that went away between parsing and polling is the same error."""
    with pytest.raises(DeviceSpecError, match=r"GPU \(GPU-a\) needs a working NVIDIA driver"):
        NvmlDevices(["GPU-a"])


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ([("CUDA_VISIBLE_DEVICES", "GPU-b"), ("CUDA_VISIBLE_DEVICES", "GPU-a")], "GPU-b,GPU-a"),
        ([("CUDA_VISIBLE_DEVICES", "MIG-c")], "MIG-c"),
        ([], ""),
    ],
)
def test_a_process_sees_its_devices_only(shown: list[tuple[str, str]], expected: str) -> None:
    """Granted GPUs are visible in the order of the grant, and a CPU slot shows none."""
    assert environment(shown) == {"CUDA_VISIBLE_DEVICES": expected}


def test_a_process_sees_listed_devices_by_their_own_variable() -> None:
    """The variable is that of the list; CUDA's is left as it is, which ROCm reads too."""
    shown = [("HIP_VISIBLE_DEVICES", "1"), ("HIP_VISIBLE_DEVICES", "0")]
    assert environment(shown) == {"HIP_VISIBLE_DEVICES": "1,0"}


@pytest.mark.parametrize(
    ("leased", "expected"),
    [
        ("cpu:0", {"ZE_AFFINITY_MASK": "-1", "CUDA_VISIBLE_DEVICES": ""}),
        ("GPU-a", {"ZE_AFFINITY_MASK": "-1", "CUDA_VISIBLE_DEVICES": "GPU-a"}),
        ("xpu-0", {"ZE_AFFINITY_MASK": "0", "CUDA_VISIBLE_DEVICES": "-1"}),
    ],
)
def test_a_process_sees_no_device_of_another_kind(leased: str, expected: dict[str, str]) -> None:
    """A trial in a CPU slot saw all devices of a list, and trained on one that another one had."""
    slots = (
        Device(id="cpu:0"),
        Device(id="GPU-a", kind="gpu", shown_by=("CUDA_VISIBLE_DEVICES", "GPU-a")),
        Device(id="xpu-0", kind="gpu", shown_by=("ZE_AFFINITY_MASK", "0")),
    )
    broker = FakeBroker(devices=[replace(each, free=each.id == leased) for each in slots])
    broker.driver()
    assert environment(broker.last(broker.worker(), "Grant").shown) == expected


@pytest.mark.usefixtures("no_nvml")
def test_cpu_slots_are_free_and_of_unknown_memory() -> None:
    """CPU slots are healthy, free of strangers, and nobody says how much memory is theirs."""
    source: DeviceSource = Devices(parse_devices("cpu:2"), host="here")
    assert source.poll(own_pids={1}).devices == (
        Device(id="cpu:0", host="here", kind="cpu", free=True),
        Device(id="cpu:1", host="here", kind="cpu", free=True),
    )
    source.close()


def test_a_device_that_does_not_answer_is_lost_after_a_while_or_at_once() -> None:
    """Until then its user is told where to look; once it answers, the time begins anew."""
    health = Health()

    def read(now: float, *, gone: bool = False) -> Device:
        return health.unread(Device(id="gpu"), "odd", now, gone=gone, look="ask its driver")

    assert read(7.0).problem == "it cannot be read (odd): ask its driver"
    device = read(7.0 + LOST_SECONDS - 0.1)
    assert (device.healthy, device.lost) == (True, False)
    device = read(7.0 + LOST_SECONDS)
    assert (device.healthy, device.lost) == (False, True)
    assert device.problem == "it cannot be read (odd): reset it, or restart the host"
    assert [health.answers(), health.answers()] == [True, False]
    assert not read(9.0 + LOST_SECONDS).lost
    assert read(9.0 + LOST_SECONDS, gone=True).lost


def test_a_fault_of_a_device_lasts_until_it_was_reset() -> None:
    """An answer alone does not mean that; that it was lost before does."""
    health = Health(fault="XID 79")
    device = health.unread(Device(id="gpu"), "odd", 0.0, gone=False, look="")
    assert (device.healthy, device.lost) == (False, False)
    health.answers()
    assert health.fault
    health.unread(Device(id="gpu"), "odd", 0.0, gone=True, look="")
    health.answers()
    assert not health.fault


def test_fake_devices_do_what_the_test_says() -> None:
    """The twin for tests is a source, changes on demand and remembers what it was asked."""
    fake = FakeDevices(Devices(parse_devices("cpu:2")).poll().devices)
    source: DeviceSource = fake
    before = source.poll(own_pids=[7]).devices
    fake.change("cpu:1", free=False)
    assert [device.free for device in before] == [True, True]
    assert [device.free for device in source.poll().devices] == [True, False]
    assert fake.polls == [{7}, frozenset()]
    with pytest.raises(KeyError):
        fake.change("cpu:2", free=False)
    source.close()
    assert fake.closed
