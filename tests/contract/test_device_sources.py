"""Every source of devices keeps the contract of ``DeviceSource``."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from optuna_hermes.broker._devices._source import Devices, DeviceSource, parse_devices
from support import nvml
from support.device_contract import DeviceHost, DeviceSourceContract

GIB = 1 << 30


class CpuHost(DeviceHost):
    """CPU slots, whose memory is the host's."""

    limited = breakable = False

    def source(self) -> DeviceSource:
        return Devices(parse_devices("cpu:2"), "here")


class ListHost(DeviceHost):
    """A list of devices, whose driver has a file for the memory in use."""

    def __init__(self, folder: Path) -> None:
        self._used = folder / "used"
        devices = [
            {"id": "amd-0", "shown_as": "0", "memory_bytes": 64 * GIB},
            {"id": "amd-1", "shown_as": "1", "memory_bytes": 64 * GIB},
        ]
        for device, path in zip(devices, (folder / "first", self._used), strict=True):
            path.write_text("0\n")
            device["used_bytes_file"] = str(path)
        self._list = folder / "amd.json"
        listed = {"variable": "HIP_VISIBLE_DEVICES", "devices": devices}
        self._list.write_text(json.dumps(listed))

    def source(self) -> DeviceSource:
        return Devices(parse_devices(str(self._list)), "here")

    def take(self, bytes_: int) -> None:
        self._used.write_text(f"{bytes_}\n")

    def lose(self) -> None:
        self._used.rename(self._used.with_suffix(".gone"))

    def find(self) -> None:
        self._used.with_suffix(".gone").rename(self._used)


class NvmlHost(DeviceHost):
    """The real binding of NVML over a library that plays a driver."""

    def __init__(self, folder: Path) -> None:
        self._library, self._words = nvml.build(folder), folder / "words"
        self._say("")

    def source(self) -> DeviceSource:
        return nvml.RemoteSource(nvml.GPUS, self._library, {"FAKE_NVML_FILE": str(self._words)})

    def take(self, bytes_: int) -> None:
        self._say(f"used={bytes_ >> 30}")

    def lose(self) -> None:
        self._say("lost")

    def find(self) -> None:
        self._say("")

    def _say(self, words: str) -> None:
        following = self._words.with_suffix(".next")
        following.write_text(words)
        os.replace(following, self._words)


class TestCpuSlots(DeviceSourceContract):
    @pytest.fixture
    def host(self) -> DeviceHost:
        return CpuHost()


class TestListedDevices(DeviceSourceContract):
    @pytest.fixture
    def host(self, tmp_path: Path) -> DeviceHost:
        return ListHost(tmp_path)


class TestNvml(DeviceSourceContract):
    @pytest.fixture
    def host(self, tmp_path: Path) -> DeviceHost:
        reason = nvml.why_not_built()
        if reason is not None:
            pytest.skip(reason)
        return NvmlHost(tmp_path)
