"""Random states and seeds of a process, and the device of plain values."""

# Torch is imported inside the functions: importing ``optuna_hermes.suspend`` must not cost seconds.

from __future__ import annotations

import contextlib
import os
import random
import secrets
import sys
from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np

from optuna_hermes.suspend._values._tree import is_sparse, mapped, storable


def rng_state(*, devices: bool = True) -> dict[str, Any]:
    """The state of every global random number generator of this process, of torch if it is loaded.

    Args:
        devices: False to leave out those of accelerators.
    """
    torch, used = sys.modules.get("torch"), None
    if devices and torch is not None:
        from optuna_hermes.suspend._tiers._accelerators import used_accelerator

        used = used_accelerator()  # asking others for their states would wake them up
    version, words, next_gauss = random.getstate()
    words = np.array(array("I", words))  # not of a tuple at once: this is done with each batch
    return {
        "torch": None if torch is None else torch.get_rng_state(),
        "accelerator": {used.kind: used.rng_states()} if used is not None else {},
        "numpy": np.random.get_state(legacy=False),
        "python": {"version": version, "words": words, "gauss": next_gauss},
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Put back what ``rng_state`` returned, in this process or in another one."""
    if state["torch"] is not None:
        import torch

        from optuna_hermes.suspend._tiers._accelerators import accelerator

        torch.set_rng_state(state["torch"])
        here = accelerator() if state["accelerator"] else None
        if here is not None and here.kind in state["accelerator"] and here.module.is_available():
            # The trial may be resumed on a host with fewer devices: its own is always the first.
            here.set_rng_states(state["accelerator"][here.kind])
    use_bits(state["numpy"]["bit_generator"])  # else NumPy refuses it
    np.random.set_state(state["numpy"])
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))


def use_bits(name: str = "MT19937") -> None:
    """Have NumPy draw from a bit generator of this class; its state is for the caller to set."""
    if type(np.random.mtrand.get_bit_generator()).__name__ != name:
        np.random.mtrand.set_bit_generator(getattr(np.random, name)(0))  # 0: draws no seed


def trial_seed(seed: int, number: int) -> int:
    """The seed of trial ``number`` in a study of ``seed``: the same in every process."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1)[0])


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and, where it is loaded, torch."""
    random.seed(seed)
    use_bits()  # the objective of another trial may have changed it
    np.random.seed(seed)
    # Not imported here: that takes seconds, and the objective may not need it.
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(seed)


def seed_entropy(seed: int) -> None:
    """Have NumPy's generators that are made without a seed take theirs from ``seed``.

    Else a trial would split its data in another way in its next process. The global generators are
    not drawn from, and that of ``random.Random()`` cannot be told. Forks of this process, such as a
    loader's workers, draw from the system: all of them would get the same.
    """
    from numpy.random import bit_generator

    own, process = random.Random(seed).getrandbits, os.getpid()
    vars(bit_generator)["randbits"] = lambda count: (
        own(count) if os.getpid() == process else secrets.randbits(count)
    )


def end_entropy() -> None:
    """Undo ``seed_entropy``: from a trial's first batch on, its next process would draw again."""
    from numpy.random import bit_generator

    vars(bit_generator)["randbits"] = secrets.randbits


@contextlib.contextmanager
def entropy_of(seed: int) -> Iterator[None]:
    """``seed_entropy`` for a while."""
    from numpy.random import bit_generator

    before = vars(bit_generator)["randbits"]
    seed_entropy(seed)
    try:
        yield
    finally:
        vars(bit_generator)["randbits"] = before


@contextlib.contextmanager
def kept_rng() -> Iterator[dict[str, Any]]:
    """Yield the random state, and restore it at the end, also after an error."""
    state = rng_state()
    try:
        yield state
    finally:
        set_rng_state(state)


def plain(value: object) -> bool:
    """True if ``torch.load(weights_only=True)`` returns a value unchanged."""
    import torch

    if type(value) in (list, tuple):
        return all(plain(item) for item in value)  # type: ignore[attr-defined]
    if type(value) is dict:
        return all(plain(item) for pair in value.items() for item in pair)
    if type(value) is torch.Tensor:
        return storable(value) or is_sparse(value)
    return value is None or type(value) in (bool, int, float, str)


def moved(value: Any, device: Any) -> Any:
    """A plain value with all its tensors on one device."""
    import torch

    return mapped(value, lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf)


def filled(present: Any, kind: Any, items: Any) -> Any:
    """Return a container with these items: ``present``, if it is of that kind."""
    if type(present) is not kind:
        return items
    present.clear()
    if isinstance(present, dict):
        present.update(items)
    else:
        present.extend(items)
    return present


def copied(present: Any, value: Any) -> Any:
    """Return an array or tensor, in ``present`` if it fits there: others may hold that."""
    import torch

    if isinstance(present, torch.Tensor) and isinstance(value, torch.Tensor):
        fits = present.is_leaf and present.dtype == value.dtype
    else:
        fits = type(present) is type(value) is np.ndarray and present.dtype == value.dtype
    if not fits or present.shape != value.shape:
        return value
    try:
        with torch.no_grad():
            present[...] = value
    except (RuntimeError, ValueError, TypeError):  # it is expanded, read-only, or sparse
        return value
    return present
