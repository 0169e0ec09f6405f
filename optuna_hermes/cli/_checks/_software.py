"""Checks of Python and of installed packages."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator

from optuna_hermes import __version__
from optuna_hermes._parent import pidfd_open
from optuna_hermes._versions import SUPPORTED, is_tested
from optuna_hermes.cli._checks import Check, State, judged

REQUIRED = ("optuna", "sqlalchemy", "filelock", "msgspec", "psutil", "numpy", "typer", "rich")
OPTIONAL = {
    "torch": "to suspend PyTorch trials",
    "lightning": "for HermesCallback",
    "pytorch-lightning": "for HermesCallback",
    "torchdata": "for loaders that resume in the middle of an epoch",
    "safetensors": "to write checkpoints",
    "scikit-learn": "for the quickstart",
}


_EITHER = ("lightning", "pytorch-lightning")


def python() -> Iterator[Check]:
    """Check the interpreter, and the system calls that a broker needs."""
    yield judged("Python", platform.python_version())
    linux = sys.platform == "linux"
    problem = "" if linux else "The broker needs Linux."
    yield judged("system", platform.platform(terse=True), problem, "fail")
    if not linux:
        return
    found = "works"
    try:
        os.close(pidfd_open(os.getpid()))
    except OSError as error:
        found = error.strerror or repr(error)
        problem = (
            "A broker sees by pidfd_open that a worker has ended: use Linux 5.3 or later, and a "
            "container whose seccomp profile allows it."
        )
    yield judged("pidfd", found, problem, "fail")


def packages() -> Iterator[Check]:
    """Check the required packages."""
    yield judged("optuna-hermes", __version__)
    for package in REQUIRED:
        yield _package(package, "fail", f"`python -m pip install {package}`")


def optional_packages() -> Iterator[Check]:
    """Check the optional packages."""
    either = [package for package in _EITHER if version(package)] or _EITHER[:1]
    for package, purpose in OPTIONAL.items():
        if package in _EITHER and package not in either:
            continue
        hint = f"Needed {purpose}: `python -m pip install 'optuna-hermes[lightning]'`."
        yield _package(package, "warn", hint)


def _package(package: str, without: State, hint: str) -> Check:
    """Check a package's version; ``without`` and ``hint`` apply if it is not installed."""
    found = version(package)
    if found is None:
        return judged(package, "not installed", hint, without)
    known = is_tested(package, found)
    problem = "" if known else f"Only versions {SUPPORTED[package]} are tested."
    return judged(package, found, problem)


def version(package: str) -> str | None:
    """The version of a package, None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
