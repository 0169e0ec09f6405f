"""Calls of modules by code between an epoch's begin and its batches, as for a rollout."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

log = logging.getLogger(__name__)


class EarlyCalls:
    """Calls a function before the first call of a module in each epoch's code before its batches.

    Args:
        first: called with no gradients being recorded.
    """

    def __init__(self, first: Callable[[], None]) -> None:
        self.missed = False
        """True if ``first`` could not be called in this epoch before the module was."""
        self._first = first
        self._modules: Collection[nn.Module] = ()
        self._parts: frozenset[int] = frozenset()
        """Ids of all their parts, once a module was called."""
        self._hook: Any = None

    def begin(self, modules: Collection[nn.Module]) -> None:
        """Watch these modules and their parts from here on, until ``end``."""
        self.end()
        self._modules, self._parts, self.missed = modules, frozenset(), False
        if modules:
            # For all modules at once, as a compiled one compiles again where its own hooks change.
            self._hook = register_module_forward_pre_hook(self._before_call)

    def end(self) -> None:
        """Watch no more."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _before_call(self, module: nn.Module, arguments: Any) -> None:
        # Made once: others may be called often here, as one that extracts features.
        self._parts = self._parts or frozenset(
            id(part) for each in self._modules for part in each.modules()
        )
        if id(module) not in self._parts:
            return
        self.end()
        # Within torch.func.functional_call a module has other tensors than its own.
        parameters = (each for part in self._modules for each in part.parameters())
        self.missed = not all(isinstance(each, nn.Parameter) for each in parameters)
        if self.missed:
            return
        try:
            with torch.no_grad():
                self._first()
        except Exception as error:  # of a module that has no state before its first call
            log.debug("Calls before an epoch's batches: %r", error)
            self.missed = True
