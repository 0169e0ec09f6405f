"""The device that ``gpu.py`` measures: the first GPU, or the simulated one of the tests."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30

Add = Callable[..., None]
"""Adds a row, given by keywords, to the rows of a part."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Device and folder of a part of the benchmark."""

    dry: bool  # True on the simulated accelerator, where everything is to be small
    kind: str  # name of the make in torch: ``cuda``
    folder: Path  # for whatever it writes

    @property
    def device(self) -> str:
        return f"{self.kind}:0"


def open_device(folder: Path, *, dry: bool) -> Setting:
    """Find the device, without using it yet."""
    import torch

    if dry:
        from support.accelerator import install

        install()
    elif not torch.accelerator.is_available():
        raise SystemExit(f"torch {torch.__version__} sees no accelerator here.")
    found = torch.accelerator.current_accelerator()
    assert found is not None
    os.environ["TRAININGS_DEVICE"] = f"{found.type}:0"  # for ``support.accelerator.trainings``
    return Setting(dry=dry, kind=found.type, folder=folder)


def build_nvml(folder: Path) -> Path:
    """Compile the tests' stand-in for NVIDIA's driver library; the folder it lies in."""
    source = next((ROOT / "tests").rglob("fake_nvml.c"))
    target = folder / "libnvidia-ml.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", target, source], check=True)
    return folder


def describe(setting: Setting, add: Add) -> None:
    """Add what torch and the system say of the device and of themselves."""
    import psutil
    import torch

    module = torch.get_device_module(setting.kind)
    free, total = module.mem_get_info(setting.device)
    facts: dict[str, Any] = {
        "device": setting.kind,
        "devices": torch.accelerator.device_count(),
        "memory, GiB": total / GIB,
        "free, GiB": free / GIB,
        "cores": os.cpu_count(),
        "host memory, GiB": psutil.virtual_memory().total / GIB,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "CUDA of torch": torch.version.cuda,
    }
    if hasattr(module, "get_device_properties"):
        found = module.get_device_properties(setting.device)
        facts["device"] = found.name
        facts["capability"] = f"{getattr(found, 'major', '')}.{getattr(found, 'minor', '')}"
    for name in ("torch", "lightning", "transformers", "optuna", "optuna-hermes"):
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            facts[name] = None
    for name, value in facts.items():
        add(fact=name, value=value)


def module_of(setting: Setting) -> Any:
    import torch

    return torch.get_device_module(setting.kind)
