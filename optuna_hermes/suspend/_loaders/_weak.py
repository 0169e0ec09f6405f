"""Dictionaries whose keys are a user's objects, told apart by identity, which may end."""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping
from typing import Any

from torch.utils.weak import WeakIdKeyDictionary, WeakIdRef


class _Reference(WeakIdRef):
    """Asks its object for nothing: torch's own asks for an attribute, by a user's __getattr__."""

    __slots__ = ()

    def __call__(self) -> Any:
        return weakref.ref.__call__(self)


def by_identity() -> MutableMapping[Any, Any]:
    """An empty dictionary, with weak references to its keys."""
    return WeakIdKeyDictionary(ref_type=_Reference)
