"""Attributes of a fit's objects that change in it and that Lightning's checkpoints lack."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from optuna_hermes._lightning._module_hooks import loads
from optuna_hermes._lightning._namespace import (
    Callback,
    LightningDataModule,
    SpikeDetection,
    Trainer,
    callbacks_of,
    parts,
)
from optuna_hermes._lightning._optimizers import optimizers_of
from optuna_hermes._lightning._pruning import is_masked
from optuna_hermes._lightning._settings import OF_TRAINER
from optuna_hermes._lightning._variables import Variables
from optuna_hermes.suspend._modules._metrics import is_metric, of_metrics
from optuna_hermes.suspend._modules._module_state import OF_LAZY_MODULES
from optuna_hermes.suspend._modules._unsaved import (
    Attributes,
    ChangedAttributes,
    is_of,
    optimizer_attributes,
    set_by,
    tensor_attributes,
)
from optuna_hermes.suspend._state import plain
from optuna_hermes.suspend._values._generators import GENERATORS, is_users_type

ADVICE = (
    "Give what holds it state_dict() and load_state_dict(), or keep it in numbers, arrays, "
    "tensors, lists and dictionaries."
)
_LIBRARIES = (
    *("lightning.", "pytorch_lightning.", "lightning_fabric."),
    *("torch.", "torchmetrics.", "optuna_hermes."),
)
OF_DATA = ("data", "data hparams")
"""Keys of the attributes of data modules."""


def unsaved(trainer: Trainer) -> ChangedAttributes:
    """Attributes of a fit's objects, the variables that their functions close over, and hooks."""
    return ChangedAttributes(
        functools.partial(_attributes, trainer, Variables()),
        named=functools.partial(_named, trainer),
        hooked=functools.partial(_hooked, trainer),
    )


def loader_sources(trainer: Trainer) -> ChangedAttributes:
    """All attributes that loaders may be made from: of the module, its parts, the data module."""
    return ChangedAttributes(lambda: _of_modules(trainer, _known(trainer)))


def _attributes(trainer: Trainer, variables: Variables) -> dict[str, Attributes]:
    module, known = trainer.lightning_module, _known(trainer)
    found: dict[str, Attributes] = {}
    for number, callback in enumerate(callbacks_of(trainer)):
        name = type(callback).__qualname__
        key = f"callback {number} {name}"
        if isinstance(callback, SpikeDetection):  # its ``load_state_dict`` raises AttributeError
            found[key] = Attributes(name, callback, known=known)
        elif _is_a_user_s(callback, Callback):
            found[key] = Attributes(name, callback, _ignores(type(callback)), known)
    found["trainer"] = Attributes("trainer", trainer, _is_left_out_of_trainer, known)
    found |= _of_plugins(trainer, known)
    found |= _of_modules(trainer, known, _is_always_saved)
    found |= tensor_attributes(type(module).__qualname__, module, known)
    for name, optimizer in optimizers_of(trainer).items():
        found |= optimizer_attributes(name, optimizer, known)
    data = getattr(trainer, "datamodule", None)
    owners = (*callbacks_of(trainer), *module.modules(), *_users_plugins(trainer).values(), data)
    closed = variables.attributes(owners, found, frozenset(known))
    known.update(variables.bound)  # for the others: a method is not changed with its object
    return found | closed


def _of_plugins(trainer: Trainer, known: set[int]) -> dict[str, Attributes]:
    """Attributes of a strategy, and of a precision plugin without ``state_dict``, of a user."""
    found = {}
    for key, plugin in _users_plugins(trainer).items():
        # Lightning never asks for a strategy's state.
        if key == "strategy" or _is_a_user_s(plugin, object):
            kind = type(plugin)
            found[key] = Attributes(kind.__qualname__, plugin, _ignores(kind), known)
    return found


def _users_plugins(trainer: Trainer) -> dict[str, Any]:
    """The strategy and the precision plugin, if they are of a user's class."""
    plugins = {"strategy": trainer.strategy, "precision plugin": trainer.precision_plugin}
    return {key: each for key, each in plugins.items() if is_users_type(type(each))}


def _is_left_out_of_trainer(name: str, value: Any) -> bool:
    """True for what Lightning sets on a trainer, and for all but plain values."""
    return name.startswith("_") or name in OF_TRAINER or not plain(value)


def _known(trainer: Trainer) -> set[int]:
    return {id(each) for each in _named(trainer).values()}


def _hooked(trainer: Trainer) -> dict[str, Any]:
    module = trainer.lightning_module
    return {type(module).__qualname__: module, **optimizers_of(trainer)}


def _of_modules(
    trainer: Trainer, known: set[int], always: Callable[[Any], bool] = lambda value: False
) -> dict[str, Attributes]:
    """Attributes of the module, its parts and the data module, and their hyper-parameters."""
    module, found = trainer.lightning_module, {}
    makes = loads(module)  # by a hook of its own, before its attributes are restored
    for place, part in module.named_modules():
        name = f"{type(module).__qualname__}.{place}".rstrip(".")
        own = functools.partial(_is_left_out, part)
        found[f"module {place}"] = Attributes(name, part, own, known, always, makes=makes)
    return {**found, **_data_module(trainer, known), **_hyper_parameters(trainer, known)}


def _is_left_out(part: nn.Module, name: str, value: Any) -> bool:
    """True for what libraries look after: of their own parts all but what users set, too."""
    kind: Any = type(part)
    own = name in _own_attributes() or is_masked(part, name)
    own = own or (is_metric(part) and of_metrics(part, name))
    return own or (is_of(kind, _LIBRARIES) and not _is_always_saved(value))


def _is_always_saved(value: Any) -> bool:
    """True for plain values and what has a state: hooks of a resumed fit may have changed it."""
    items = value.values() if isinstance(value, dict) else value
    each_of = items if isinstance(value, dict | list | tuple) else [value]
    return plain(value) or any(
        isinstance(each, GENERATORS) or hasattr(type(each), "load_state_dict") for each in each_of
    )


@functools.cache
def _own_attributes() -> frozenset[str]:
    """Attributes of every LightningModule, which Lightning or torch restores or sets up itself."""
    modules = (each.LightningModule() for each in parts("core.module"))
    others = ("_hparams_name", "_log_hyperparams", *OF_LAZY_MODULES)
    return frozenset().union(*map(vars, modules), others)


def _data_module(trainer: Trainer, known: set[int]) -> dict[str, Attributes]:
    data = getattr(trainer, "datamodule", None)
    if not isinstance(data, LightningDataModule) or not _is_a_user_s(data, LightningDataModule):
        return {}
    kind = type(data)
    return {"data": Attributes(kind.__qualname__, data, _ignores(kind), known)}


class _HyperParameters(Attributes):
    """The ``hparams`` of a module or data module."""

    def _all(self) -> dict[str, Any]:
        found = vars(self.owner).get("_hparams")
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
        "wrapped optimizer": getattr(trainer.strategy, "_lightning_optimizers", ()),
    }
    return {
        "trainer": trainer,
        "strategy": trainer.strategy,
        **({} if data is None else {"data": data}),
        **{f"tensor {place}": each for place, each in tensors},
        **{f"module {place}": each for place, each in module.named_modules()},
        **{f"{kind} {n}": each for kind, some in lists.items() for n, each in enumerate(some)},
        **optimizers_of(trainer),
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
