"""The packages for OptunaHub's registry, loaded from their folder."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import optuna
import pytest

from optuna_hermes import HermesPruner, HermesSampler

optunahub = pytest.importorskip("optunahub")

ROOT = Path(__file__).parents[2]
REGISTRY = ROOT / "integrations" / "optunahub" / "package"
PACKAGES = {"samplers/hermes": "HermesSampler", "pruners/hermes": "HermesPruner"}


def load(package: str) -> Any:
    return optunahub.load_local_module(package, registry_root=str(REGISTRY))


def test_they_are_the_classes_of_this_package() -> None:
    """A class that is loaded from a registry is the installed one, and nothing else is loaded."""
    found = {package: load(package) for package in PACKAGES}
    assert {name: module.__all__ for name, module in found.items()} == {
        name: [word] for name, word in PACKAGES.items()
    }
    assert found["samplers/hermes"].HermesSampler is HermesSampler
    assert found["pruners/hermes"].HermesPruner is HermesPruner


@pytest.mark.parametrize("package", PACKAGES)
def test_the_example_runs(
    package: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A study with both, as the registry's page shows it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(optunahub, "load_module", load)
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    example = runpy.run_path(str(REGISTRY / package / "example.py"), run_name="__main__")
    optuna.logging.set_verbosity(verbosity)
    study = example["study"]
    assert {trial.state.name for trial in study.trials} == {"COMPLETE"}
    assert len(study.trials) == 20
    assert str(study.best_trial.params) in capsys.readouterr().out


@pytest.mark.parametrize("package", PACKAGES)
def test_without_this_package_it_says_what_to_install(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The registry's copy alone is of no use."""
    monkeypatch.setitem(sys.modules, "optuna_hermes", None)
    with pytest.raises(ImportError, match="pip install optuna-hermes"):
        load(package)


@pytest.mark.parametrize("package", PACKAGES)
def test_it_has_what_the_registry_asks_for(package: str) -> None:
    """Front matter with all its fields, the tag of its category, sections, and a licence."""
    folder = REGISTRY / package
    front, text = re.fullmatch(
        r"---\n(.*?)\n---\n(.*)", (folder / "README.md").read_text(), re.DOTALL
    ).groups()  # type: ignore[union-attr]
    fields = dict(line.split(": ", 1) for line in front.splitlines())
    assert list(fields) == ["author", "title", "description", "tags", "optuna_versions", "license"]
    assert package.split("s/")[0] in fields["tags"].strip("[]").split(", ")
    assert fields["license"] == "MIT License"
    assert (folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    for section in ("Abstract", "Class or Function Names", "Installation", "Example"):
        assert f"## {section}\n" in text
