"""Lightning's side of the simulated accelerator."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator

from support.accelerator._device_module import KIND


class SimulatedAccelerator(Accelerator):
    """To be given to a Trainer, with ``strategy=SingleDeviceStrategy(device)``."""

    def setup_device(self, device: torch.device) -> None:
        torch.accelerator.set_device_index(device)

    def teardown(self) -> None:
        torch.accelerator.empty_cache()

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device(KIND, index) for index in range(int(devices))]

    @staticmethod
    def auto_device_count() -> int:
        return torch.accelerator.device_count()

    @staticmethod
    def is_available() -> bool:
        return torch.accelerator.is_available()

    @staticmethod
    def name() -> str:
        return KIND

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return dict(torch.accelerator.memory_stats(device))
