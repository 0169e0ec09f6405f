"""constraints.txt can be installed by every Python that pyproject.toml admits."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = ("3.10.0", "3.11.0", "3.12.0", "3.13.0", "3.14.0")


def pins() -> list[Requirement]:
    text = (ROOT / "constraints.txt").read_text()
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    return [Requirement(line) for line in lines if line]


def needed_python(name: str) -> SpecifierSet:
    """Return the Python versions that a distribution takes; any, if it is not installed here."""
    try:
        metadata = importlib.metadata.metadata(name).json
    except importlib.metadata.PackageNotFoundError:
        return SpecifierSet()
    return SpecifierSet(str(metadata.get("requires_python", "")))


def test_torch_is_not_bound_to_its_build_for_cpus() -> None:
    """A user with a GPU gets the one for it; each build of torch asks for CUDA libraries itself."""
    (torch,) = (pin for pin in pins() if pin.name == "torch")
    version = str(torch.specifier).removeprefix("==")
    assert all(torch.specifier.contains(f"{version}{build}") for build in ("", "+cpu", "+cu130"))
    of_cuda = [pin.name for pin in pins() if pin.name.startswith(("nvidia-", "cuda-", "triton"))]
    assert of_cuda == ["nvidia-ml-py"]


def test_a_pin_is_for_every_python_or_says_for_which() -> None:
    """A pin that some Python cannot install makes all of the README's commands fail there."""
    wrong = [
        f"{pin.name} needs Python {needed}, not {python}"
        for pin in pins()
        for needed in [needed_python(pin.name)]
        for python in PYTHONS
        if pin.marker is None or pin.marker.evaluate({"python_version": python[:4]})
        if not needed.contains(python)
    ]
    assert not wrong
