"""Calls of modules by code between an epoch's begin and its batches, as for a rollout."""

from __future__ import annotations

import functools
import itertools
import logging
import warnings
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from optuna_hermes.suspend._values._fingerprint import fingerprint

log = logging.getLogger(__name__)


class EarlyCalls:
    """Calls a function before the first call of a module in each epoch's code before its batches.

    Args:
        first: copies the state of the modules; called with no gradients being recorded.
    """

    def __init__(self, first: Callable[[], None]) -> None:
        self.at_once = False
        """True to call ``first`` at the begin: an epoch has changed a module before it called one.

        So is a target that follows the model before it is asked for labels.
        """
        self.called = False
        """True if a module was called in this epoch."""
        self.missed = False
        """True if a module was called, and ``first`` was not while all were as at the begin."""
        self.changed = False
        """True if it was ``missed``, and the modules may be others before the first batch, too."""
        self._first = first
        self._modules: Collection[nn.Module] = ()
        self._parts: frozenset[int] = frozenset()
        """Ids of all their parts, once a module was called."""
        self._at_begin = 0
        self._copies = self._due = False
        self._hook: Any = None

    def begin(self, modules: Collection[nn.Module], *, copies: bool) -> None:
        """Watch these modules and their parts from here on, until the epoch's batches.

        Args:
            copies: False in an epoch that may have no batches, which need no copy.
        """
        self.end()
        self._modules, self._parts = modules, frozenset()
        self.called = self.missed = self.changed = False
        self._copies, self._due = copies, copies and not self.at_once
        if not modules:
            return
        if self._due:
            self._at_begin = self._fingerprint()
        elif copies:
            self.missed = not self._call()
        _be_quiet()
        # For all modules at once, as a compiled one compiles again where its own hooks change.
        self._hook = register_module_forward_pre_hook(self._before_call)

    def batches(self) -> None:
        """Watch no more, as the epoch's batches begin."""
        if self.missed and self._due:
            self.changed = self._have_changed()
        self.end()

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
        # Of a compiled module no part is called by a hook once it is compiled.
        if not {id(module), id(getattr(module, "_orig_mod", None))} & self._parts:
            return
        self.end()
        self.called = True
        if not self._copies:
            # Such an epoch could be stored at its begin.
            self.missed = self.changed = True
        elif self._due:
            # Within torch.func.functional_call a module has other tensors than its own.
            parameters = (each for part in self._modules for each in part.parameters())
            own = all(isinstance(each, nn.Parameter) for each in parameters)
            self.missed = not own or self._have_changed() or not self._call()

    def _have_changed(self) -> bool:
        """True if the modules have other weights than at the begin; the next epochs copy these."""
        changed = self._fingerprint() != self._at_begin
        self.at_once = self.at_once or changed
        return changed

    def _fingerprint(self) -> int:
        # Not the versions alone: writing to ``parameter.data`` leaves them as they are.
        tensors = [(*each.parameters(), *each.buffers()) for each in self._modules]
        return fingerprint(list(itertools.chain(*tensors)))

    def _call(self) -> bool:
        """Call ``first``; False if it cannot be called."""
        try:
            with torch.no_grad():
                self._first()
        except Exception as error:  # of a module that has no state before its first call
            log.debug("Calls before an epoch's batches: %r", error)
            return False
        return True


@functools.cache
def _be_quiet() -> None:
    """Keep torch from warning of the hook where a compiled module is called: it is gone by then."""
    warnings.filterwarnings(
        "ignore", "Using `torch.compile\\(module\\)` when there are global hooks"
    )
