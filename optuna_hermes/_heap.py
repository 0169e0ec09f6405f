"""Objects of this process by their class."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from itertools import chain
from typing import Any

_frozen: list[weakref.ref[Any]] = []
"""Loaders, data sets, accelerators and scalers that the garbage collector no longer lists."""


def freeze() -> None:
    """Let the garbage collector pass over all that there is, but let ``objects`` find loaders."""
    data = sys.modules.get("torch.utils.data")
    amp = sys.modules.get("torch.amp")
    accelerate = sys.modules.get("accelerate")
    kinds = [
        *((data.DataLoader, data.IterableDataset) if data is not None else ()),
        *((amp.GradScaler,) if amp is not None else ()),
        *((accelerate.Accelerator,) if accelerate is not None else ()),
    ]
    if kinds:
        _frozen.extend(weakref.ref(each) for each in _listed(*kinds))
    gc.freeze()


def objects(*kinds: type) -> Iterator[Any]:
    """The objects of these classes and of their subclasses, those of before ``freeze`` first."""
    living = (each for ref in _frozen if (each := ref()) is not None)
    return chain((each for each in living if issubclass(type(each), kinds)), _listed(*kinds))


def _listed(*kinds: type) -> Iterator[Any]:
    sought: dict[type, bool] = {}  # objects are many, their classes few
    for each in gc.get_objects():
        # Not isinstance: it reads __class__, which runs the code of proxies.
        kind = type(each)
        if kind not in sought:
            # Not issubclass: IterableDataset is an abstract class, which takes long to answer.
            sought[kind] = any(other in kinds for other in kind.__mro__)
        if sought[kind]:
            yield each
