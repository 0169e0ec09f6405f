"""Hooks of modules, tensors and optimizers: code that no checkpoint holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from optuna_hermes.suspend._values._fingerprint import CODE, bound_to, fingerprint

_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_LIBRARIES = ("torch.", "lightning.", "pytorch_lightning.")
"""Their hooks go with what they are for: the mask of a pruned weight, for example."""


class Hooks:
    """The hooks of several objects, as far as the training registers or removes them from now on.

    Args:
        owners: modules and optimizers by their names in messages; others have none.
    """

    def __init__(self, owners: Mapping[str, Any]) -> None:
        self._owners = owners
        self._first = self._present()

    @property
    def lost(self) -> list[str]:
        """Names for the hooks of those that have others than at the beginning."""
        now = self._present().items()
        return [f"{name}.hooks" for name, hooks in now if hooks != self._first[name]]

    def _present(self) -> dict[str, list[Any]]:
        known: set[int] = set()
        return {name: list(_hooks(owner, known)) for name, owner in self._owners.items()}


def _hooks(owner: object, known: set[int]) -> Iterator[tuple[object, str, int]]:
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
                    yield place, kind, fingerprint(code, [id(bound_to(code))])


def _hooked(owner: object) -> Iterator[tuple[object, Any]]:
    if isinstance(owner, nn.Module):
        yield from owner.named_modules()
        yield from owner.named_parameters()
    elif isinstance(owner, torch.optim.Optimizer):
        yield "", owner
        for group in owner.param_groups:
            yield from enumerate(group["params"])
