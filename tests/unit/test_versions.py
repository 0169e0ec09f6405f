"""Refusal of versions of libraries, and its message."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from optuna_hermes._lightning import _namespace
from optuna_hermes._versions import SUPPORTED, is_tested, require
from optuna_hermes.errors import VersionError

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


@pytest.mark.parametrize(
    ("distribution", "found", "install"),
    [
        ("optuna", "4.3.0", "optuna>=4.4,<6"),
        ("optuna", "6.0.0", "optuna>=4.4,<6"),
        ("lightning", "2.3.3", "lightning>=2.4,<3"),
        ("pytorch-lightning", "1.9.5", "pytorch-lightning>=2.4,<3"),
        ("torch", "2.5.1+cu124", "torch>=2.6"),
    ],
)
def test_a_version_that_cannot_do_is_refused(distribution: str, found: str, install: str) -> None:
    """One line says what is supported, what was found, and what to type."""
    with pytest.raises(VersionError) as raised:
        require(distribution, found)
    known = SUPPORTED[distribution]
    assert str(raised.value) == (
        f"optuna_hermes supports {known.name} {known.first} to {known.last} but found {found}: "
        f"run `pip install '{install}'`."
    )


@pytest.mark.parametrize(
    ("distribution", "found", "tested"),
    [
        ("optuna", "4.4.0", True),
        ("optuna", "5.1.0.dev0", False),
        ("lightning", "2.6.6", True),
        ("lightning", "2.5.1.post0", True),
        ("torch", "2.13.0+cpu", True),
        ("torch", "3.0.0", False),
    ],
)
def test_others_may_do(distribution: str, found: str, tested: bool) -> None:
    """Later minor versions are not refused, only not tested."""
    require(distribution, found)
    assert is_tested(distribution, found) == tested


def test_the_project_says_the_same() -> None:
    """The versions that pip is told are those that an import goes by."""
    text = PROJECT.read_text()
    for distribution, known in SUPPORTED.items():
        below = f",<{known.below}" if known.below else ""
        said = set(re.findall(rf'"{distribution}(>=[^"]*)"', text))
        assert said == {f">={known.first}{below}"}, distribution


def _python(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.parametrize(
    ("library", "found", "module"),
    [
        ("optuna", "4.3.0", "optuna_hermes.sampler"),
        ("torch", "2.5.1", "optuna_hermes.pytorch"),
    ],
)
def test_an_import_is_refused(library: str, found: str, module: str) -> None:
    """The last line of the traceback is all that one has to read."""
    done = _python(f"import {library}\n{library}.__version__ = {found!r}\nimport {module}\n")
    assert done.returncode == 1
    assert re.match(
        rf"optuna_hermes\.errors\.VersionError: .* but found {found}: run `pip install .*`\.$",
        done.stderr.splitlines()[-1],
    )


def test_the_command_line_says_one_line() -> None:
    """Without a traceback; what needs no Optuna works."""
    done = _python(
        "import optuna, sys\n"
        "optuna.__version__ = '4.3.0'\n"
        "from optuna_hermes.cli import run\n"
        "assert run(['--version']) == 0\n"
        "sys.exit(run(['quickstart', '--devices', 'cpu:1']))\n"
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: optuna_hermes supports Optuna 4.4 to 5.0 but found 4.3.0")
    assert len(done.stderr.splitlines()) == 1


def test_a_lightning_that_is_too_old_is_refused_when_a_script_has_imported_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another one that is there as well, and will do, makes no difference to that script."""
    old = ModuleType("pytorch_lightning")
    old.__version__ = "2.3.3"  # type: ignore[attr-defined]
    monkeypatch.delitem(sys.modules, "lightning.pytorch", raising=False)
    monkeypatch.setitem(sys.modules, "pytorch_lightning", old)
    with pytest.raises(VersionError, match=r"PyTorch Lightning 2\.4 to 2\.6 but found 2\.3\.3"):
        _namespace.refuse_unsupported()


def test_no_lightning_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command that installs it is named."""
    for root in _namespace.ROOTS:
        monkeypatch.delitem(sys.modules, root, raising=False)
    monkeypatch.setattr(_namespace.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'optuna-hermes\[lightning\]'"):
        _namespace.refuse_unsupported()
