"""Calls that can run code in data are few, each with its reason here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import optuna_hermes

ROOT = Path(optuna_hermes.__file__).parent

OWN_PIPE = "comes through the private pipe of the process that forked or started this one"
ALLOWED = {
    ("suspend/_ranks/_rank.py", "torch.load"): f"state of another rank: {OWN_PIPE}",
    ("suspend/_ranks/_rank.py", "pickle.loads"): "its own error, to see that it can be made again",
    ("suspend/_ranks/_rank.py", "recv"): f"what the other end of the pipe says: {OWN_PIPE}",
    ("suspend/_ranks/_parent.py", "recv"): f"what a rank says: {OWN_PIPE}",
    ("workers/_fresh.py", "pickle.loads"): f"study and objective: {OWN_PIPE}",
    ("workers/_once.py", "pickle.loads"): f"arguments of a function: {OWN_PIPE}",
    ("workers/_preload.py", "__import__"): "libraries whose names stand there",
    ("workers/_fork_server.py", "pickle.loads"): f"study and objective: {OWN_PIPE}",
    ("workers/_worker.py", "cloudpickle.loads"): f"the study: {OWN_PIPE}",
    ("workers/_objective.py", "cloudpickle.loads"): f"the objective: {OWN_PIPE}",
    ("workers/_objective.py", "exec_module"): "FILE.py:NAME: the file that the user has named",
    ("policies/_custom.py", "runpy.run_path"): "FILE.py:CLASS: the file that the user has named",
}

LOADERS = {
    "pickle": ("load", "loads", "Unpickler"),
    "_pickle": ("load", "loads", "Unpickler"),
    "cloudpickle": ("load", "loads"),
    "dill": ("load", "loads"),
    "joblib": ("load",),
    "marshal": ("load", "loads"),
    "shelve": ("open", "Shelf"),
    "pandas": ("read_pickle",),
    "runpy": ("run_path", "run_module"),
    "yaml": ("load", "full_load", "unsafe_load", "load_all"),
    "torch": ("load",),
    "numpy": ("load",),
}
"""Whatever unpickles or trials; how a call may be harmless is in ``_is_harmless``."""


def dangerous(source: str) -> Iterator[str]:
    """Every call in a module that may run what it reads, or is given what does."""
    tree = ast.parse(source)
    names = _imported(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = _name(node.func, names)
            _, _, function = called.rpartition(".")
            given = (_name(argument, names) for argument in node.args)
            yield from (name for name in given if _loads(name))
            if _loads(called):
                if not _is_harmless(called, node):
                    yield called
            elif called in ("eval", "exec", "__import__"):
                yield called
            elif function in ("exec_module", "recv") and not (function == "recv" and node.args):
                yield function  # of a socket it takes a size, of a pipe it unpickles


def _loads(name: str) -> bool:
    module, _, function = name.rpartition(".")
    return function in LOADERS.get(module.split(".")[0], ())


def _imported(tree: ast.AST) -> dict[str, str]:
    """Return the full name that each imported name stands for."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names |= {a.asname or a.name: f"{module}.{a.name}" for a in node.names}
    return names


def _name(node: ast.expr, names: dict[str, str]) -> str:
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value, names)}.{node.attr}"
    return ""


def _is_harmless(called: str, node: ast.Call) -> bool:
    given = {keyword.arg: keyword.value for keyword in node.keywords}
    if called == "torch.load":
        return _is(given.get("weights_only"), True)
    if called == "numpy.load":  # it refuses pickles unless it is told otherwise
        return "allow_pickle" not in given or _is(given["allow_pickle"], False)
    return False


def _is(node: ast.expr | None, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def test_nothing_is_unpickled_but_what_a_process_sends_its_own_family() -> None:
    """Nothing from a socket, a database or a checkpoint is; the list has no entry too many."""
    found = {
        (path.relative_to(ROOT).as_posix(), call)
        for path in ROOT.rglob("*.py")
        for call in dangerous(path.read_text())
    }
    assert found == set(ALLOWED)


@pytest.mark.parametrize(
    ("source", "calls"),
    [
        ("import pickle\npickle.loads(data)", ["pickle.loads"]),
        ("import pickle as p\np.Unpickler(file)", ["pickle.Unpickler"]),
        ("from cloudpickle import loads as wake\nwake(data)", ["cloudpickle.loads"]),
        ("import cloudpickle\npatiently(cloudpickle.loads, data)", ["cloudpickle.loads"]),
        ("def f():\n    import torch\n    torch.load(path)", ["torch.load"]),
        ("import torch\ntorch.load(path, weights_only=False)", ["torch.load"]),
        ("import torch\ntorch.load(path, weights_only=safe)", ["torch.load"]),
        ("import torch\ntorch.load(path, weights_only=True)", []),
        ("import numpy as np\nnp.load(path, allow_pickle=True)", ["numpy.load"]),
        ("import numpy as np\nnp.load(path)", []),
        ("import yaml\nyaml.load(text)", ["yaml.load"]),
        ("import yaml\nyaml.safe_load(text)", []),
        ("import marshal, shelve\nmarshal.loads(b)\nshelve.open(p)", None),
        ("eval(text)", ["eval"]),
        ("exec(text)", ["exec"]),
        ("net.eval()", []),
        ("end.recv()", ["recv"]),
        ("sock.recv(4096)", []),
        ("import json\njson.loads(text)", []),
    ],
)
def test_the_search_finds_what_it_is_for(source: str, calls: list[str] | None) -> None:
    """Aliases, inner imports and options that make a call harmless are understood."""
    found = list(dangerous(source))
    assert found == (["marshal.loads", "shelve.open"] if calls is None else calls)
