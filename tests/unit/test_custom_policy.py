"""A policy of the user's own, by the name of its class: from a file, from a module, elsewhere."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from optuna_hermes.broker._imports import absolute_policy_name, import_folders
from optuna_hermes.broker._server import _policy_modules
from optuna_hermes.broker._server._policy_modules import look_in, try_policy
from optuna_hermes.errors import InvalidInputError, UnknownPolicyError
from optuna_hermes.model import Device, Snapshot, TrialView
from optuna_hermes.policies import make_policy

NEWEST = """
from __future__ import annotations

from dataclasses import dataclass

from optuna_hermes.model import Decision
from optuna_hermes.policies import Policy

SIGN = -1


@dataclass
class Settings:
    sign: int = SIGN


class Newest(Policy):
    def decide(self, snapshot):
        trial = min(snapshot.trials, key=lambda trial: Settings().sign * trial.number)
        return Decision(memory=trial.number)


class Tuned(Newest):
    def __init__(self, depth):
        self.depth = depth


class Half(Policy):
    pass


class Leaving(Newest):
    def __init__(self):
        raise SystemExit(3)


number = 3
"""

RUNS = tuple(TrialView(number=number, state="parked") for number in range(3))
SNAPSHOT = Snapshot(devices=(Device(id="cpu:0", free=True),), trials=RUNS)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with ``mine.py``; this process works there and cannot import from it."""
    (tmp_path / "mine.py").write_text(NEWEST)
    monkeypatch.chdir(tmp_path)
    # Neither this folder nor one of another test of this process.
    paths = [path for path in sys.path if not Path(path, "mine.py").exists()]
    monkeypatch.setattr(sys, "path", paths)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return tmp_path


@pytest.mark.parametrize("place", ["mine.py", "{folder}/mine.py", "mine"])
def test_it_decides(folder: Path, place: str) -> None:
    """A file by either path, and a module of this folder, give an object that works."""
    policy = make_policy(f"{place.format(folder=folder)}:Newest")
    assert policy.decide(SNAPSHOT).memory == 2


def test_modules_beside_the_file_are_imported(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy in several files works from everywhere, also where a method imports."""
    (folder / "beside_one.py").write_text("SIGN = -1\n")
    (folder / "beside_two.py").write_text("EXTRA = 40\n")
    changed = NEWEST.replace("SIGN = -1", "from beside_one import SIGN")
    late = "from beside_two import EXTRA; return Decision(memory=EXTRA + trial.number)"
    changed = changed.replace("return Decision(memory=trial.number)", late)
    (folder / "mine.py").write_text(changed)
    monkeypatch.chdir("/")
    policy = make_policy(f"{folder}/mine.py:Newest")
    assert policy.decide(SNAPSHOT).memory == 42


def test_what_was_changed_in_the_file_counts(folder: Path) -> None:
    """A file is read anew: a broker that has served it before serves what it is now."""
    assert make_policy("mine.py:Newest").decide(SNAPSHOT).memory == 2
    (folder / "mine.py").write_text(NEWEST.replace("SIGN = -1", "SIGN = 1"))
    assert make_policy("mine.py:Newest").decide(SNAPSHOT).memory == 0


@pytest.fixture
def projects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """Folders of two projects, each with a policy that imports ``beside``; a broker's process."""
    paths = [path for path in sys.path if not Path(path, "mine.py").exists()]
    monkeypatch.setattr(sys, "path", paths)
    for name in ("mine", "beside"):  # other tests' folders have such files, too
        monkeypatch.delitem(sys.modules, name, raising=False)
    before = frozenset(sys.modules)
    monkeypatch.setattr(_policy_modules, "_BEFORE", before)  # what other tests have imported
    folders = [tmp_path / "one", tmp_path / "other"]
    for sign, folder in zip((-1, 1), folders, strict=True):
        package = folder / "project"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        for place, module in ((folder / "mine.py", "beside"), (package / "mine.py", ".beside")):
            imported = f"from {module} import SIGN"
            place.write_text(NEWEST.replace("SIGN = -1", imported))
            (place.parent / "beside.py").write_text(f"SIGN = {sign}\n")
    yield folders
    for name in sys.modules.keys() - before:
        if str(tmp_path) in str(vars(sys.modules[name]).get("__file__")):
            del sys.modules[name]


FORMS = ["{folder}/mine.py:Newest", "energy:{folder}/mine.py:Newest", "project.mine:Newest"]


@pytest.mark.parametrize("form", FORMS)
def test_a_broker_gives_no_policy_another_projects_module(projects: list[Path], form: str) -> None:
    """It imports a module once, for all: the second project's policy ran with the first's."""
    one, other = (form.format(folder=folder) for folder in projects)
    try_policy(one, [os.fspath(projects[0])])
    there = sys.modules.copy()
    with pytest.raises(InvalidInputError, match=r"beside|project") as caught:
        try_policy(other, [os.fspath(projects[1])])
    assert f"from {projects[0]}" in str(caught.value)
    assert f"not from {projects[1]}" in str(caught.value)
    assert "`optuna-hermes broker --stop`" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert sys.modules == there  # nothing was imported for it, nor anew
    try_policy(one, [os.fspath(projects[0])])
    try_policy("fifo", ())


@pytest.mark.parametrize("spoils", [False, True])
def test_a_module_that_is_found_in_another_projects_folder_is_noticed(
    projects: list[Path], spoils: bool
) -> None:
    """That folder comes first in a broker, also where nothing was imported from it before."""
    (projects[0] / "mine.py").write_text(NEWEST)
    (projects[0] / "beside.py").write_text("" if spoils else "SIGN = 3")
    try_policy(f"{projects[0]}/mine.py:Newest", [os.fspath(projects[0])])
    with pytest.raises(InvalidInputError, match=f"'beside' from {projects[0]}/beside.py, not"):
        try_policy(f"{projects[1]}/mine.py:Newest", [os.fspath(projects[1])])


@pytest.mark.parametrize("form", FORMS)
def test_a_broker_takes_no_earlier_version_of_a_module(projects: list[Path], form: str) -> None:
    """A policy whose module was edited ran with what the broker had imported before."""
    name, folders = form.format(folder=projects[0]), [os.fspath(projects[0])]
    try_policy(name, folders)
    (projects[0] / "train.py").write_text("the objective is none of its modules")
    try_policy(name, folders)
    package = projects[0] / "project" if form.startswith("project") else projects[0]
    (package / "beside.py").write_text("SIGN = 1  # edited\n")
    with pytest.raises(InvalidInputError, match=f"imported {package}/beside.py before its last"):
        try_policy(name, folders)
    (package / "beside.py").unlink()
    try_policy(name, folders)


def test_a_file_is_run_anew_whatever_has_its_name(
    projects: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another project's ``mine.py``, imported by its policy, is none of this one's modules."""
    place = projects[0] / "run_anew.py"
    place.write_text(NEWEST)
    other = ModuleType("run_anew")
    other.__file__ = os.fspath(projects[1] / "run_anew.py")
    monkeypatch.setitem(sys.modules, "run_anew", other)
    try_policy(f"{place}:Newest", [os.fspath(projects[0])])


def test_a_module_of_a_package_is_imported() -> None:
    """A module that can be imported is, with its package."""
    policy = make_policy("optuna_hermes.policies:Fifo")
    assert type(policy) is type(make_policy("fifo"))


@pytest.mark.parametrize(
    ("target", "error", "words"),
    [
        ("nowhere.py:Newest", UnknownPolicyError, "'nowhere.py' cannot be read: No such file"),
        ("nowhere:Newest", UnknownPolicyError, "no 'nowhere'.*FILE.py:CLASS"),
        ("mine.py:Oldest", UnknownPolicyError, "class 'Oldest' in mine.py"),
        ("mine.py:", UnknownPolicyError, "FILE.py:CLASS or module:CLASS but got 'mine.py:'"),
        ("mine.py:number", InvalidInputError, "subclass of optuna_hermes.policies.Policy"),
        ("mine.py:Settings", InvalidInputError, "subclass of optuna_hermes.policies.Policy"),
        ("mine.py:Tuned", InvalidInputError, "without arguments.*depth"),
        ("mine.py:Half", InvalidInputError, "without arguments.*decide"),
        ("mine.py:Leaving", InvalidInputError, "without arguments.*SystemExit"),
        ("broken.py:Newest", InvalidInputError, "Importing broken.py raised.*no_such_thing"),
        ("ends.py:Newest", InvalidInputError, "Importing ends.py raised SystemExit"),
    ],
)
def test_what_is_wrong_is_one_line(
    folder: Path, target: str, error: type[Exception], words: str
) -> None:
    """No file, no class, no policy, arguments, an import that fails: each says which it is."""
    (folder / "broken.py").write_text("import no_such_thing\n")
    (folder / "ends.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(error, match=words) as caught:
        make_policy(target)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("at", ["import", "init"])
@pytest.mark.parametrize(
    ("error", "words"),
    [("AssertionError('x' * 5_000_000)", r"AssertionError\('xxx"), ("Unreadable()", "Unreadable")],
)
def test_an_error_is_said_whatever_it_holds(folder: Path, at: str, error: str, words: str) -> None:
    """No message to a driver may be as long, and a broker's connection ended without a word."""
    shown = "    def __repr__(self):\n        return self.text\n"
    lines = f"class Unreadable(Exception):\n{shown}\n"
    lines += f"def fail():\n    raise {error}\n"
    lines += "fail()\n" if at == "import" else NEWEST.replace("raise SystemExit(3)", "fail()")
    (folder / "fails.py").write_text(lines.replace("from __future__ import annotations\n", ""))
    with pytest.raises(InvalidInputError, match=f"raised {words}") as caught:
        make_policy("fails.py:Leaving")
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("place", ["mine.py", "./mine.py", "mine"])
def test_another_process_finds_it_too(
    folder: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker may work elsewhere: the name that it gets holds the whole path."""
    name = absolute_policy_name(f"{place}:Newest")
    assert name == f"{folder}/mine.py:Newest"
    monkeypatch.chdir("/")
    assert make_policy(name).decide(SNAPSHOT).memory == 2


@pytest.mark.parametrize("name", ["hermes", "astrology", "optuna_hermes.policies:Fifo"])
def test_other_names_mean_the_same_everywhere(name: str) -> None:
    """Names of this package, and modules of packages, need no path."""
    assert absolute_policy_name(name) == name


def test_a_broker_imports_from_where_its_driver_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders that it lacks come last, so that nothing of its own is hidden."""
    monkeypatch.setattr(sys, "path", ["", "/nowhere"])
    monkeypatch.chdir(tmp_path)
    assert import_folders() == (str(tmp_path), "/nowhere")
    look_in([os.fspath(tmp_path), "/nowhere"])
    assert sys.path == ["", "/nowhere", str(tmp_path)]


def test_only_the_suite_for_policies_needs_hypothesis(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions for tests of a framework come without it, and what lacks is named."""
    for name in ("optuna_hermes.testing", "optuna_hermes.testing.policy"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    module = importlib.import_module("optuna_hermes.testing")
    assert module.FakeSession
    with pytest.raises(ModuleNotFoundError, match=r"run `pip install hypothesis`\."):
        _ = module.PolicyContract
