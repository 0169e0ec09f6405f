"""Attributes of a fit's objects that change in it and that Lightning's checkpoints lack."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from optuna_hermes._lightning._module import is_saved, of_libraries
from optuna_hermes._lightning._namespace import (
    Callback,
    LightningDataModule,
    SpikeDetection,
    Trainer,
    callbacks_of,
)
from optuna_hermes._lightning._optimizers import inner
from optuna_hermes.suspend._hooks import Hooks
from optuna_hermes.suspend._unsaved import (
    Attributes,
    Unsaved,
    is_private,
    optimizer_attributes,
    set_by,
)

ADVICE = (
    "Give what holds it state_dict() and load_state_dict(), or keep it in numbers, arrays, "
    "tensors, lists and dictionaries."
)
_LIBRARIES = ("lightning.", "pytorch_lightning.", "torch.", "torchmetrics.", "optuna_hermes.")


def unsaved(trainer: Trainer) -> Unsaved:
    """Attributes of the user's callbacks, module, parts of it, optimizers, and data module."""
    module, named = trainer.lightning_module, functools.partial(_named, trainer)
    known = {id(each) for each in named().values()}
    parts: dict[str, Attributes] = {}
    for number, callback in enumerate(callbacks_of(trainer)):
        name = type(callback).__qualname__
        key = f"callback {number} {name}"
        if isinstance(callback, SpikeDetection):  # its ``load_state_dict`` raises AttributeError
            parts[key] = Attributes(name, callback, known=known)
        elif _is_a_user_s(callback, Callback):
            parts[key] = Attributes(name, callback, _ignores(type(callback)), known)
    for place, part in module.named_modules():
        if not type(part).__module__.startswith(_LIBRARIES):
            own = functools.partial(is_saved, part, known=known)
            deletes = functools.partial(_is_a_user_s_attribute, part)
            name = type(module).__qualname__ + (f".{place}" if place else "")
            parts[f"module {place}"] = Attributes(name, part, own, known, deletes)
    parts |= {**_of_tensors(module, known), **_data_module(trainer, known)}
    for name, optimizer in _optimizers(trainer).items():
        parts |= optimizer_attributes(name, optimizer, known)
    return Unsaved({**parts, **_hyper_parameters(trainer, known)}, named)


def hooks_of(trainer: Trainer) -> Hooks:
    """The hooks of the module, and of the optimizers."""
    module = trainer.lightning_module
    return Hooks({type(module).__qualname__: module, **_optimizers(trainer)})


def _optimizers(trainer: Trainer) -> dict[str, Any]:
    own = {f"optimizer {i}": each for i, each in enumerate(trainer.optimizers)}
    return {**own, **inner(trainer)}


def loader_sources(trainer: Trainer) -> Unsaved:
    """All attributes that loaders may be made from: of the module, its parts, the data module."""
    module, known = trainer.lightning_module, {id(each) for each in _named(trainer).values()}
    parts = {
        f"module {place}": Attributes(place, part, functools.partial(_of_libraries, part), known)
        for place, part in module.named_modules()
        if not type(part).__module__.startswith(_LIBRARIES)
    }
    parts |= {**_data_module(trainer, known), **_hyper_parameters(trainer, known)}
    return Unsaved(parts)


def _of_tensors(module: nn.Module, known: set[int]) -> dict[str, Attributes]:
    """Attributes of parameters and buffers, such as the real weights of a binarised network."""
    kind = type(module).__qualname__
    # Of the tensors themselves: a pruned parameter gets another name.
    return {
        f"tensor {place}": Attributes(f"{kind}.{place}", each, is_private, known)
        for place, each in (*module.named_parameters(), *module.named_buffers())
    }


def _data_module(trainer: Trainer, known: set[int]) -> dict[str, Attributes]:
    data = getattr(trainer, "datamodule", None)
    if not isinstance(data, LightningDataModule) or not _is_a_user_s(data, LightningDataModule):
        return {}
    kind = type(data)
    return {"data": Attributes(kind.__qualname__, data, _ignores(kind), known)}


class _HyperParameters(Attributes):
    """The ``hparams`` of a module or data module."""

    def _attributes(self) -> dict[str, Any]:
        found = vars(self._owner).get("_hparams")
        return found if isinstance(found, dict) else {}  # another is one of OmegaConf's


def _hyper_parameters(trainer: Trainer, known: set[int]) -> dict[str, Attributes]:
    owners = {"data": getattr(trainer, "datamodule", None)}
    owners |= {f"module {place}": part for place, part in trainer.lightning_module.named_modules()}
    return {
        f"{key} hparams": _HyperParameters(f"{type(each).__qualname__}.hparams", each, known=known)
        for key, each in owners.items()
        if "_hparams" in getattr(each, "__dict__", {})
    }


def _named(trainer: Trainer) -> dict[str, object]:
    """Objects that are not the user's own, or that are saved with the trainer, by name."""
    module, data = trainer.lightning_module, getattr(trainer, "datamodule", None)
    tensors = (*module.named_parameters(), *module.named_buffers())
    lists: dict[str, Iterable[object]] = {
        "logger": trainer.loggers,
        "callback": callbacks_of(trainer),
        "scheduler": (each.scheduler for each in trainer.lr_scheduler_configs),
        "wrapped optimizer": getattr(trainer.strategy, "_lightning_optimizers", ()),
    }
    return {
        "trainer": trainer,
        "strategy": trainer.strategy,
        **({} if data is None else {"data": data}),
        **{f"tensor {place}": each for place, each in tensors},
        **{f"module {place}": each for place, each in module.named_modules()},
        **{f"{kind} {n}": each for kind, some in lists.items() for n, each in enumerate(some)},
        **_optimizers(trainer),
    }


def _is_a_user_s(each: object, base: type) -> bool:
    """True if an object's class is a user's, and has no ``state_dict`` of its own."""
    kind = type(each)
    # A mock passes for its ``spec`` in ``isinstance``, but its class has none of those methods.
    if kind.__module__.startswith(_LIBRARIES) or not issubclass(kind, base):
        return False
    # None has it where an object only answers like a callback, as a mock does.
    owner = next((kind for kind in kind.__mro__ if "state_dict" in vars(kind)), None)
    return owner is not None and (owner is base or owner.__module__.startswith(_LIBRARIES))


def _ignores(kind: Any) -> Callable[[str, Any], bool]:
    names = set_by(kind, _LIBRARIES)
    return lambda name, value: name in names


def _is_a_user_s_attribute(part: nn.Module, name: str) -> bool:
    return not of_libraries(part, name)


def _of_libraries(part: nn.Module, name: str, value: Any) -> bool:
    return of_libraries(part, name)
