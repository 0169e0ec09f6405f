"""The state of torchmetrics' metrics, which their ``state_dict`` mostly leaves out."""

from __future__ import annotations

import functools
import sys
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from optuna_hermes.suspend._state import moved, plain
from optuna_hermes.suspend._values._tree import with_plain_tensors


def _of_torchmetrics(name: str) -> Any:
    """A class of torchmetrics, for ``isinstance``; an empty tuple if it is not imported."""
    return getattr(sys.modules.get("torchmetrics"), name, ())


def is_metric(part: object) -> bool:
    """True for a metric; an abstract class takes long to answer that for each in a new process."""
    return _of_torchmetrics("Metric") in type(part).__mro__


def metrics_in(module: nn.Module) -> list[tuple[str, Any]]:
    """The metrics among a module and its parts, by their places."""
    return [(name, part) for name, part in module.named_modules() if is_metric(part)]


def parts_with_metrics(value: object) -> list[tuple[str, nn.Module]]:
    """A module and its parts, by their places, if there are metrics among them; else none."""
    parts = list(value.named_modules()) if isinstance(value, nn.Module) else []
    return parts if any(is_metric(part) for _, part in parts) else []


def of_metrics(metric: Any, name: str) -> bool:
    """True for an attribute that ``metric_state`` saves, or that torchmetrics sets up itself."""
    return name in metric._defaults or name in _of_every_metric()


@functools.cache
def _of_every_metric() -> frozenset[str]:
    methods = {"update": lambda self: None, "compute": lambda self: None}
    return frozenset(vars(type("_Bare", (_of_torchmetrics("Metric"),), methods)()))


def metric_state(metric: Any) -> dict[str, Any]:
    """The state of a torchmetrics metric, which its ``state_dict`` mostly leaves out."""
    computed, forward = with_plain_tensors([metric._computed, metric._forward_cache])
    return {
        "states": with_plain_tensors(dict(metric.metric_state)),
        "updates": metric._update_count,
        "computed": computed if plain(computed) else None,
        "forward": forward if plain(forward) else None,
    }


def restore_metrics(module: nn.Module, states: Mapping[str, Any]) -> None:
    """Restore the metrics of a module and its parts, as many of them as trackers had."""
    fit_trackers(module, states)
    for name, metric in metrics_in(module):
        if name in states:
            restore_metric(metric, moved(states[name], metric.device))


def fit_trackers(module: nn.Module, names: Collection[str]) -> None:
    """Let trackers have the metrics of these ``names``: add those that lack, remove all others.

    An epoch's code that runs again has added some once more.
    """

    def has(place: str) -> bool:
        return any(f"{name}.".startswith(f"{place}.".lstrip(".")) for name in names)

    kind = _of_torchmetrics("MetricTracker")
    trackers = [(place, part) for place, part in module.named_modules() if isinstance(part, kind)]
    for place, part in trackers:
        while has(f"{place}.{len(part)}"):
            part.increment()
        if has(f"{place}._base_metric"):  # of which it adds copies: the first of its parts
            while len(part) > 1 and not has(f"{place}.{len(part) - 1}"):
                del part._modules[str(len(part) - 1)]


def restore_metric(metric: Any, state: dict[str, Any]) -> None:
    for name, value in state["states"].items():
        setattr(metric, name, value)
    metric._update_count = state["updates"]
    metric._computed = state["computed"]
    metric._forward_cache = state["forward"]
