"""The objects that a user's loop passes to ``suspendable``, and their state."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.utils.data import DataLoader

from optuna_hermes.errors import InvalidInputError, SuspendError
from optuna_hermes.suspend._modules._module_state import (
    at_places,
    ignored_of,
    kept_groups,
    plain_attributes,
    put_back,
    set_gradient,
    set_plain,
    state_of,
    trained_by,
    with_places,
)
from optuna_hermes.suspend._modules._parts import changed, parts_of, why_not_loadable
from optuna_hermes.suspend._modules._unsaved import (
    Attributes,
    ChangedAttributes,
    engine_attributes,
    is_private,
    optimizer_attributes,
    reachable,
    tensor_attributes,
)
from optuna_hermes.suspend._state import copied
from optuna_hermes.suspend._values._kept import SMALL_BYTES, KeptValues, size_of
from optuna_hermes.suspend._values._tree import (
    frozen,
    same,
    with_references,
    without_references,
)

if TYPE_CHECKING:
    from optuna_hermes.suspend._values._classes import Classes

_SCHEDULES = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
_Plain = dict[str, dict[str, Any]]
"""Numbers, text and flags in attributes of modules and their parts, by place and name."""


class NamedObjects:
    """The named objects that a loop changes, and the values in ``run.kept``.

    Args:
        owners: modules, optimizers and so on, by the names used in messages.
        classes: the classes that kept objects may have; None for none.
        others: attributes of other objects that change, too, by keys for ``ChangedAttributes``.

    Raises:
        InvalidInputError: one of them has no ``state_dict`` or ``load_state_dict``.
    """

    def __init__(
        self,
        owners: Mapping[str, Any],
        classes: Classes | None = None,
        others: Mapping[str, Attributes] | None = None,
    ) -> None:
        for name, owner in owners.items():
            _check(name, owner)
        self._kept = KeptValues(classes)
        self._too_large: set[str] = set()
        self._owners = {**owners, **held(owners)}
        self._plain_at_start = self._plain()
        self._plain_before: _Plain = {}
        """The attributes in whose place are those of an epoch's begin, until all is loaded."""
        self.unsaved = ChangedAttributes(
            functools.partial(_attributes, self._owners, others or {}),
            named=functools.partial(_by_name, self._owners),
            hooked=functools.partial(dict, self._owners),
        )
        """Their attributes and hooks."""
        self._parts = {name: parts_of(each) for name, each in self._owners.items()}

    @property
    def kept(self) -> dict[str, Any]:
        """The values in ``run.kept``."""
        return self._kept.values

    def roots(self) -> list[object]:
        """Objects that lead to every tensor."""
        return [*self._owners.values(), self.kept]

    def stored(self) -> dict[int, object]:
        """The objects that a checkpoint holds, by ``id``; of very many the nearest."""
        owned = reachable(_by_name(self._owners).values())
        # Apart: a kept list of a hundred thousand items would leave no room for others.
        return owned | reachable([self.kept], known=owned)

    @property
    def reshaped(self) -> list[str]:
        """Names of objects whose state does not fit them as they were before the loop."""
        return changed(self._parts, {name: parts_of(each) for name, each in self._owners.items()})

    @functools.cached_property
    def why_not_loadable(self) -> str | None:
        """The reason why a module or optimizer cannot be stored, None if each can."""
        kinds = (nn.Module, torch.optim.Optimizer)
        owners = (pair for pair in self._owners.items() if isinstance(pair[1], kinds))
        return next(filter(None, (why_not_loadable(*pair) for pair in owners)), None)

    def note_classes(self) -> None:
        """Note classes, dtypes and shared parts; right before the loop, where all are converted."""
        for name, each in self._owners.items():
            self._parts[name] = self._parts[name].converted(parts_of(each))

    def note_kept(self) -> None:
        """Note what is kept, what attributes and what hooks there are, right before the loop."""
        self.unsaved.note()
        self.unsaved.start()
        self._kept.note_packages()

    def _plain(self) -> _Plain:
        """The present numbers, text and flags."""
        parts = _parts_of_modules(self._owners).items()
        return {place: plain_attributes(part) for place, part in parts}

    def state_dict(self) -> dict[str, Any]:
        """The state of all, as a tree of tensors and plain values; the tensors are not copied.

        Raises:
            UnstorableError: a kept value could not be made again.
        """
        owners = {name: self._state_of(owner) for name, owner in self._owners.items()}
        return {
            "owners": owners,
            "trained": {
                name: [(each, each.grad, each.requires_grad) for each in parameters]
                for name, parameters in _trained(self._owners).items()
            },
            "unsaved": self.unsaved.state_dict(),
            **self._kept.state_dict(lambda: self._tensors(owners)),
        }

    def _state_of(self, owner: Any) -> dict[str, Any]:
        state = state_of(owner)
        return state if isinstance(owner, nn.Module) else self._referring(state)

    def _referring(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state with references to other named objects, as a schedule that holds one may have."""
        names = {id(each): name for name, each in self._owners.items()}
        return {**state, "state": with_references(state["state"], names)}

    def _at_hand(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state that was given to ``_referring``, with the objects themselves."""
        return {**state, "state": without_references(state["state"], self._owners)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore all; the tensors of ``state`` may be taken over.

        Raises:
            SuspendError: the state is not of these objects.
        """
        saved = state["owners"]
        if saved.keys() != self._owners.keys():
            named = ", ".join(self._owners) or "nothing"
            raise SuspendError(f"it holds {', '.join(saved) or 'nothing'}, not {named}")
        present, trained = _trained(self._owners), state["trained"]
        with kept_groups(self._owners.values()):
            for name, owner in self._owners.items():
                try:
                    put_back(owner, self._at_hand(saved[name]))
                    if name in trained:
                        _put_parameters_back(present[name], trained[name])
                except (MemoryError, torch.OutOfMemoryError):
                    raise  # the device has no room now, and the checkpoint is whole
                except Exception as error:
                    raise SuspendError(f"{name} cannot be loaded from it: {error}") from error
        set_plain(_parts_of_modules(self._owners), self._plain_before)
        self._plain_before = {}
        self.unsaved.load_state_dict(state["unsaved"])
        self.load_kept(state)

    def load_kept(self, state: dict[str, Any]) -> None:
        """Restore the kept values only.

        Raises:
            SuspendError: the state is not of these values and objects.
        """
        self._kept.load_state_dict(state, self._tensors)

    def small_state(self) -> dict[str, Any]:
        """A copy of what is small: all but weights, the states of optimizers, and large values.

        It is made at each epoch's begin, so that the code before its batches can run again from
        there: what that computes may depend on schedules, settings of optimizers, kept values, and
        numbers, text and flags in attributes of modules.
        """
        groups, others = {}, {}
        for name, owner in self._owners.items():
            if isinstance(owner, torch.optim.Optimizer):
                groups[name] = [_settings(group) for group in owner.param_groups]
            elif not isinstance(owner, nn.Module):
                others[name] = self._small_state_of(name, owner)
        attributes = self._changed_plain()
        state = {"groups": groups, "others": others, "attributes": attributes}
        state |= self._kept.small_state()
        return cast("dict[str, Any]", frozen(state))

    def _small_state_of(self, name: str, owner: Any) -> Any:
        """An object's state, None if it is too large, or ever was so: making it takes time."""
        if name in self._too_large:
            return None
        try:
            state = self._referring(with_places(owner.state_dict()))
        except Exception:  # of one that makes its state with its first step
            return None
        if size_of(state) <= SMALL_BYTES:
            return state
        self._too_large.add(name)
        return None

    def load_small_state(self, state: dict[str, Any]) -> None:
        """Restore what ``small_state`` has returned."""
        for name, saved in state["groups"].items():
            for group, settings in zip(self._owners[name].param_groups, saved, strict=False):
                for each, value in settings.items():
                    group[each] = copied(group.get(each), value)
        for name, own in state["others"].items():
            if own is not None:
                self._owners[name].load_state_dict(at_places(self._at_hand(own)))
        self._load_plain(state["attributes"])
        self._kept.load_state_dict(state, self._tensors)

    def _changed_plain(self) -> _Plain:
        """The attributes that differ from those that each process makes."""
        changed: _Plain = {}
        for place, own in self._plain().items():
            first = self._plain_at_start.get(place, {})
            others = {n: each for n, each in own.items() if not same(each, first.get(n, first))}
            if others:
                changed[place] = others
        return changed

    def _load_plain(self, changed: _Plain) -> None:
        """Restore what ``_changed_plain`` has returned, until all is loaded."""
        self._plain_before = self._plain()
        attributes: _Plain = {}
        for place, own in self._plain_before.items():
            then = self._plain_at_start.get(place, {}) | changed.get(place, {})
            # Not in the place of what is a tensor, or is gone, by now.
            attributes[place] = {name: then[name] for name in own.keys() & then.keys()}
        set_plain(_parts_of_modules(self._owners), attributes)

    @property
    def modules(self) -> list[nn.Module]:
        """The named modules."""
        return list(_modules(self._owners).values())

    def modules_state(self) -> dict[str, Any]:
        """A copy of the states of the modules."""
        modules = _modules(self._owners).items()
        return cast("dict[str, Any]", frozen({name: state_of(each) for name, each in modules}))

    def load_modules_state(self, states: dict[str, Any]) -> None:
        """Restore what ``modules_state`` has returned; its tensors may be taken over."""
        for name, state in states.items():
            put_back(self._owners[name], state)

    def _tensors(self, states: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The tensors of the named objects, at the same places in each process."""
        found: dict[str, Any] = {}
        for name, parameters in _trained(self._owners).items():
            found[f"trained by {name}"] = _with_gradients(enumerate(parameters))
        for name, owner in self._owners.items():
            if isinstance(owner, nn.Module):
                buffers = dict(owner.named_buffers(remove_duplicate=False))
                weights = owner.named_parameters(remove_duplicate=False)
                found[name] = buffers | _with_gradients(weights)
            else:
                found[name] = owner.state_dict() if states is None else states[name]["state"]
        return found


def _with_gradients(parameters: Iterable[tuple[Any, torch.Tensor]]) -> dict[Any, Any]:
    pairs = list(parameters)
    gradients = ((name, each.grad) for name, each in pairs)
    return dict(pairs) | {f"{name}.grad": each for name, each in gradients if each is not None}


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def held(owners: Mapping[str, Any]) -> dict[str, Any]:
    """Optimizers and schedulers in attributes of owners, whose ``state_dict`` may lack them."""
    found: dict[str, Any] = {}
    known = {id(each) for each in owners.values()}
    waiting = list(owners.items())
    while waiting:
        name, owner = waiting.pop()
        # The attributes of modules are watched, and torch's own classes store what they hold.
        if isinstance(owner, nn.Module) or type(owner).__module__.startswith("torch."):
            continue
        for place, each in _parts(name, owner):
            if issubclass(type(each), _SCHEDULES) and id(each) not in known:
                known.add(id(each))
                found[place] = each
                waiting.append((place, each))
    return found


def _parts(name: str, owner: object) -> Iterator[tuple[str, object]]:
    """The attributes of an object, and the items of those that are containers."""
    attributes: dict[str, Any] = getattr(owner, "__dict__", {})
    for attribute, value in attributes.items():
        yield f"{name}.{attribute}", value
        if issubclass(type(value), list | tuple | dict):  # a proxy may raise for ``isinstance``
            items = value.items() if issubclass(type(value), dict) else enumerate(value)
            yield from ((f"{name}.{attribute}.{place}", each) for place, each in items)


def _attributes(
    owners: Mapping[str, Any], others: Mapping[str, Attributes]
) -> dict[str, Attributes]:
    """Attributes of modules, their parts and optimizers that are in no ``state_dict``."""
    known = {id(each) for each in _by_name(owners).values()}
    parts = {
        place: Attributes(place.rstrip("."), part, ignored_of(part), known)
        for place, part in _parts_of_modules(owners).items()
    }
    for name, each in _modules(owners).items():
        parts |= tensor_attributes(name, each, known)
    for name, trained in _trained(owners).items():
        for number, tensor in enumerate(trained):
            place = f"parameter {number} of {name}"
            parts[place] = Attributes(place, tensor, is_private, known)
    for name, owner in owners.items():
        parts |= optimizer_attributes(name, owner, known)
        parts |= engine_attributes(name, owner, known)
    return {**parts, **others}


def _modules(owners: Mapping[str, Any]) -> dict[str, nn.Module]:
    return {name: each for name, each in owners.items() if isinstance(each, nn.Module)}


def _parts_of_modules(owners: Mapping[str, Any]) -> dict[str, nn.Module]:
    """The modules and their parts, by the same names in each process."""
    return {
        f"{name}.{place}": part
        for name, each in _modules(owners).items()
        for place, part in each.named_modules()
    }


def _by_name(owners: Mapping[str, Any]) -> dict[str, object]:
    """The owners, and the parts and parameters of modules, by the same names in each process."""
    return {
        f"{name}.{place}".rstrip("."): part
        for name, each in _modules(owners).items()
        for place, part in (*each.named_modules(), *each.named_parameters())
    } | dict(owners)


def _trained(owners: Mapping[str, Any]) -> dict[str, list[torch.Tensor]]:
    """The parameters that named optimizers train and that are in no named module."""
    modules = _modules(owners).values()
    known = {id(parameter) for each in modules for parameter in each.parameters()}
    return {
        name: [each for each in trained_by(owner) if id(each) not in known]
        for name, owner in owners.items()
        if isinstance(owner, torch.optim.Optimizer)
    }


def _check(name: str, owner: object) -> None:
    if isinstance(owner, DataLoader):
        raise InvalidInputError(
            f"suspendable({name}=...) must not be a loader, but is a {type(owner).__name__}: give "
            "it to run.batches(), which keeps its position."
        )
    methods = [getattr(owner, method, None) for method in ("state_dict", "load_state_dict")]
    if isinstance(owner, type) or not all(callable(method) for method in methods):
        raise InvalidInputError(
            f"suspendable({name}=...) must have state_dict() and load_state_dict(), but is "
            f"{_short(owner)}: write these two methods, or keep plain values in run.kept."
        )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"of {type(value).__name__}"


def _put_parameters_back(parameters: list[torch.Tensor], states: list[Any]) -> None:
    for parameter, (value, grad, trains) in zip(parameters, states, strict=True):
        with torch.no_grad():
            parameter.copy_(value)
        parameter.requires_grad_(trains)
        set_gradient(parameter, grad)
