"""The kinds of loaders: by whom their positions and processes are kept."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from optuna_hermes.suspend._values._generators import GeneratorOwner


def is_stateful(loader: Any) -> bool:
    """True if a loader keeps its position by itself.

    One that wraps another (Accelerate's) always has the methods, but a state only if the inner one
    has.
    """
    base = getattr(loader, "base_dataloader", None)
    return callable(getattr(loader, "state_dict", None)) and (base is None or is_stateful(base))


def is_stream(loader: Any) -> bool:
    """True for a loader over an iterable data set that begins anew in each epoch."""
    if not isinstance(loader, DataLoader) or hasattr(loader, "base_dataloader"):
        return False
    if type(loader)._get_iterator is not DataLoader._get_iterator:
        return False
    kept = keeps_iterator(loader) or (loader.num_workers and loader.persistent_workers)
    return isinstance(loader.dataset, IterableDataset) and not kept


def has_workers(loader: object) -> bool:
    return isinstance(loader, DataLoader) and loader.num_workers > 0


def keeps_iterator(loader: object) -> bool:
    """True for a loader that goes on with one iterator in all its epochs.

    For example timm's ``MultiEpochsDataLoader``, and ``InfiniteDataLoader`` of ultralytics.
    """
    own = {**getattr(loader, "__dict__", {}), "_iterator": None}  # of workers that persist
    return any(isinstance(each, _BaseDataLoaderIter) for each in own.values())


def length_of(value: Any) -> int | None:
    """The length of a loader, sampler or data set, None if it has none."""
    try:
        return len(value)
    except (TypeError, NotImplementedError):
        return None


def data_of(loader: Any) -> list[GeneratorOwner]:
    """A loader's data set and its user's collate function, in which generators may be."""
    collate: Any = getattr(loader, "collate_fn", None)
    if has_workers(loader):
        # Few loaders have processes.
        from optuna_hermes.suspend._loaders._workers import Collate

        # While a loader's workers start it has ours, which holds the user's.
        collate = collate.inner if issubclass(type(collate), Collate) else collate
    return [
        GeneratorOwner("dataset", getattr(loader, "dataset", None)),
        GeneratorOwner("collate_fn", collate),
    ]
