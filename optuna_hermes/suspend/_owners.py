"""The whole state of modules and other owners: ``state_dict``, and the parts it leaves out."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from optuna_hermes.suspend._state import moved, plain


def state_of(owner: Any) -> dict[str, Any]:
    """The state of an object, as a tree for ``put_back``.

    The ``state_dict`` of a module leaves out open gradients, buffers that are not persistent, the
    states of torchmetrics, and which parts are frozen or evaluating: here they are too.
    """
    state = owner.state_dict()
    if not isinstance(owner, nn.Module):
        return {"state": state}
    parameters = dict(owner.named_parameters())
    return {
        "state": state,
        "buffers": {name: part for name, part in owner.named_buffers() if name not in state},
        "gradients": {name: p.grad for name, p in parameters.items() if p.grad is not None},
        "frozen": [name for name, p in parameters.items() if not p.requires_grad],
        "evaluating": [name for name, part in owner.named_modules() if not part.training],
        "metrics": {name: _metric_state(metric) for name, metric in _metrics(owner)},
    }


def put_back(owner: Any, state: dict[str, Any]) -> None:
    """Restore an object's state; the tensors of ``state`` may be taken over."""
    owner.load_state_dict(state["state"])
    if not isinstance(owner, nn.Module):
        return
    for name, buffer in owner.named_buffers():
        if name in state["buffers"]:
            buffer.data = state["buffers"][name].to(buffer.device)
    for name, parameter in owner.named_parameters():
        gradient = state["gradients"].get(name)
        parameter.grad = None if gradient is None else gradient.to(parameter.device)
        parameter.requires_grad_(name not in state["frozen"])
    for name, part in owner.named_modules():
        part.training = name not in state["evaluating"]
    for name, metric in _metrics(owner):
        _restore_metric(metric, moved(state["metrics"][name], metric.device))


def _metrics(module: nn.Module) -> list[tuple[str, Any]]:
    torchmetrics = sys.modules.get("torchmetrics")  # imported if there is a metric
    if torchmetrics is None:
        return []
    kind = torchmetrics.Metric
    return [(name, part) for name, part in module.named_modules() if isinstance(part, kind)]


def _metric_state(metric: Any) -> dict[str, Any]:
    return {
        "states": dict(metric.metric_state),
        "updates": metric._update_count,
        "computed": metric._computed if plain(metric._computed) else None,
        "forward": metric._forward_cache if plain(metric._forward_cache) else None,
    }


def _restore_metric(metric: Any, state: dict[str, Any]) -> None:
    for name, value in state["states"].items():
        setattr(metric, name, value)
    metric._update_count = state["updates"]
    metric._computed = state["computed"]
    metric._forward_cache = state["forward"]
