"""Hooks of modules, tensors and optimizers: code that no checkpoint holds."""

from __future__ import annotations

import dis
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from optuna_hermes.suspend._values._fingerprint import CODE, bound_to, fingerprint, outside
from optuna_hermes.suspend._values._generators import (
    GENERATORS,
    cells_of,
    content_of,
    dict_of,
    is_users_function,
    slots_in,
)

_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_CONTAINERS = (list, deque, dict, set, bytearray)
_Hook = tuple[object, str, int, dict[str, int]]
"""Place, kind, and code of a hook, and fingerprints of what it remembers."""
_LIBRARIES = ("torch.", "lightning.", "pytorch_lightning.")
"""Their hooks go with what they are for: the mask of a pruned weight, for example."""


class Hooks:
    """The hooks of several objects: those that come and go in training, and what they remember.

    Args:
        owners: modules and optimizers by their names in messages; others have none.
    """

    def __init__(self, owners: Mapping[str, Any]) -> None:
        self._owners = owners
        self._first = self._present(())

    def lost(self, saved: Callable[[], Collection[int]]) -> list[str]:
        """Names for the hooks of those that have others than at the beginning.

        Args:
            saved: returns the ids of objects that are saved elsewhere.
        """
        others = self._others(())
        # Looked for only then, which takes long.
        return self._others(saved()) if others else []

    def _others(self, saved: Collection[int]) -> list[str]:
        now = self._present(saved).items()
        return [f"{name}.hooks" for name, hooks in now if _differ(self._first[name], hooks)]

    def _present(self, saved: Collection[int]) -> dict[str, list[_Hook]]:
        known: set[int] = set()
        return {name: list(_hooks(owner, known, saved)) for name, owner in self._owners.items()}


def _differ(first: list[_Hook], now: list[_Hook]) -> bool:
    if [each[:3] for each in first] != [each[:3] for each in now]:
        return True
    # Only what is remembered now: what is saved elsewhere is none of it.
    return any(
        a[3].get(at) != each for a, b in zip(first, now, strict=True) for at, each in b[3].items()
    )


def _hooks(owner: object, known: set[int], saved: Collection[int]) -> Iterator[_Hook]:
    """The code of each hook with its place, but for the objects in ``known``, which get more."""
    for place, each in _hooked(owner):
        if id(each) in known:
            continue
        known.add(id(each))
        kinds = _OF_TENSORS if isinstance(each, torch.Tensor) else vars(each)
        for kind in [name for name in kinds if name.endswith("_hooks")]:
            found = getattr(each, kind, None)
            # Torch's are dictionaries; others of such a name are the user's: a list, a setting.
            for hook in found.values() if isinstance(found, dict) else ():
                if not str(getattr(hook, "__module__", "")).startswith(_LIBRARIES):
                    # Of an object its class: its attributes are no hooks.
                    code = hook if isinstance(hook, CODE) else type(hook)
                    seen = {id(each), *saved}
                    memory = {at: fingerprint(part) for at, part in _remembered(hook, seen)}
                    yield place, kind, fingerprint(code, [id(bound_to(code))]), memory


def _hooked(owner: object) -> Iterator[tuple[object, Any]]:
    if isinstance(owner, nn.Module):
        yield from owner.named_modules()
        yield from owner.named_parameters()
    elif isinstance(owner, torch.optim.Optimizer):
        yield "", owner
        for group in owner.param_groups:
            yield from enumerate(group["params"])


def _remembered(hook: Any, seen: set[int], place: str = "") -> Iterator[tuple[str, Any]]:
    """What a hook of the user's code sets, fills or draws from, in the code and objects it has.

    Without tensors: mostly they are those of its last call.
    """
    hook = hook.func if issubclass(type(hook), partial) else hook
    owner: Any = None if type(hook) is FunctionType else getattr(hook, "__self__", hook)
    function = hook.__func__ if type(hook) is MethodType else hook
    if type(function) is not FunctionType:
        kinds = map(vars, type(hook).__mro__)
        function = next((each["__call__"] for each in kinds if "__call__" in each), None)
    if id(hook) in seen or id(owner) in seen or type(function) is not FunctionType:
        return
    # Modules and the like are stored by themselves, or named as what they are.
    if not is_users_function(function) or hasattr(type(owner), "load_state_dict"):
        return
    seen |= {id(hook), *([] if owner is None else [id(owner)])}
    codes = list(_codes(function.__code__, type(owner)))
    used = {name for code in codes for name in code.co_names}
    found = {n: each for n, each in (dict_of(owner) | slots_in(owner)).items() if n in used}
    found |= {name: content_of(cell) for name, cell in cells_of(function).items()}
    found |= {str(number): each for number, each in enumerate(function.__defaults__ or ())}
    for name, value in found.items():
        kind = type(value)
        if id(value) in seen:
            continue
        sets = any(_sets(code, name) for code in codes)
        if issubclass(kind, (*_CONTAINERS, *GENERATORS)) or (sets and not outside(value)):
            yield f"{place}.{name}", _without_tensors(value)
        else:
            yield from _remembered(value, seen, f"{place}.{name}")


def _codes(code: CodeType, kind: type) -> Iterator[CodeType]:
    """A code, those of functions within it, and those of methods of ``kind`` that it calls."""
    waiting, seen = [code], set[CodeType]()
    while waiting:
        each = waiting.pop()
        if each in seen:
            continue
        seen.add(each)
        yield each
        waiting += [inner for inner in each.co_consts if isinstance(inner, CodeType)]
        methods = (vars(base).get(name) for name in each.co_names for base in kind.__mro__)
        waiting += [method.__code__ for method in methods if type(method) is FunctionType]


def _sets(code: CodeType, name: str) -> bool:
    sets = ("STORE_ATTR", "STORE_DEREF")
    return any(each.opname in sets and each.argval == name for each in dis.get_instructions(code))


def _without_tensors(value: Any) -> Any:
    if issubclass(type(value), torch.Tensor):
        return None
    if issubclass(type(value), dict):
        items = dict.items(value)
        return {name: each for name, each in items if not issubclass(type(each), torch.Tensor)}
    if issubclass(type(value), list | tuple | deque):
        return [_without_tensors(each) for each in value]
    return value
