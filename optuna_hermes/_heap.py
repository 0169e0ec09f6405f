"""Objects of this process by their class."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import stat
import sys
import weakref
from collections.abc import Iterator
from itertools import chain
from typing import Any

_WRITTEN = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
"""Classes of open files that have a buffer to be written."""

_frozen: list[weakref.ref[Any]] = []
"""Files, loaders, data sets, accelerators and scalers that the collector no longer lists."""


def freeze() -> None:
    """Let the garbage collector pass over all that there is by now.

    ``objects`` still finds open files that have a buffer, loaders, iterable data sets, accelerators
    and gradient scalers.
    """
    data = sys.modules.get("torch.utils.data")
    amp = sys.modules.get("torch.amp")
    accelerate = sys.modules.get("accelerate")
    kinds = [
        *_WRITTEN,
        *((data.DataLoader, data.IterableDataset) if data is not None else ()),
        *((amp.GradScaler,) if amp is not None else ()),
        *((accelerate.Accelerator,) if accelerate is not None else ()),
    ]
    _frozen.extend(weakref.ref(each) for each in _listed(*kinds))
    gc.freeze()


def flush_files() -> None:
    """Write what open files have in their buffers.

    Before forks, each of which would write it, too; and when a worker exits, which it does without
    what Python does for files that nobody closes.
    """
    for each in objects(*_WRITTEN):
        with contextlib.suppress(Exception):  # it is closed, or its disk is full
            # Nobody may read the other end of a pipe or socket.
            if stat.S_ISREG(os.fstat(each.fileno()).st_mode):
                each.flush()


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
