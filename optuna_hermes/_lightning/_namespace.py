"""The two namespaces of Lightning, ``lightning.pytorch`` and ``pytorch_lightning``.

They hold the same code twice, so that no class of one is a class of the other. A script imports
either, and a process may import both. So nothing here imports one of them by name: ``isinstance``
goes by the names of classes, and other parts are taken from the namespace of a trainer.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from optuna_hermes._versions import require
from optuna_hermes.errors import VersionError

if TYPE_CHECKING:
    from lightning.pytorch import Callback as Callback
    from lightning.pytorch import LightningDataModule as LightningDataModule
    from lightning.pytorch import LightningModule as LightningModule
    from lightning.pytorch import Trainer as Trainer
    from lightning.pytorch.callbacks import BaseFinetuning as BaseFinetuning
    from lightning.pytorch.callbacks import BatchSizeFinder as BatchSizeFinder
    from lightning.pytorch.callbacks import (
        GradientAccumulationScheduler as GradientAccumulationScheduler,
    )
    from lightning.pytorch.callbacks import LearningRateFinder as LearningRateFinder
    from lightning.pytorch.callbacks import LearningRateMonitor as LearningRateMonitor
    from lightning.pytorch.callbacks import ModelCheckpoint as ModelCheckpoint
    from lightning.pytorch.callbacks import ModelPruning as ModelPruning
    from lightning.pytorch.callbacks import RichProgressBar as RichProgressBar
    from lightning.pytorch.callbacks import SpikeDetection as SpikeDetection
    from lightning.pytorch.callbacks import StochasticWeightAveraging as StochasticWeightAveraging
    from lightning.pytorch.callbacks import ThroughputMonitor as ThroughputMonitor
    from lightning.pytorch.callbacks import Timer as Timer
    from lightning.pytorch.callbacks import TQDMProgressBar as TQDMProgressBar
    from lightning.pytorch.loggers import CSVLogger as CSVLogger
    from lightning.pytorch.loggers import TensorBoardLogger as TensorBoardLogger
    from lightning.pytorch.loops.fetchers import (
        _DataLoaderIterDataFetcher as _DataLoaderIterDataFetcher,
    )
    from lightning.pytorch.profilers import SimpleProfiler as SimpleProfiler
    from lightning.pytorch.trainer.connectors.logger_connector.result import (
        _ResultCollection as _ResultCollection,
    )
    from lightning.pytorch.trainer.connectors.logger_connector.result import (
        _ResultMetric as _ResultMetric,
    )

    AnyCallback = Callback
else:

    def __getattr__(name: str) -> type:
        """A stand-in for the classes of a name, for annotations and ``isinstance``."""
        if name.startswith("__"):
            raise AttributeError(name)
        return _named(name)

    class AnyCallback:
        """Base of callbacks that are ``Callback`` s of every Lightning imported until then."""

        def __new__(cls, *args: Any, **kwargs: Any) -> AnyCallback:
            """Make an object of a subclass of ``cls``."""
            # Now, and not where the class is made: that may be before the script imports Lightning.
            return object.__new__(_joined(cls, tuple(map(_callback_of, roots()))))

        def __reduce__(self) -> tuple[Any, ...]:
            return AnyCallback.__new__, (self._made_as,), vars(self)


ROOTS = {"lightning.pytorch": "lightning", "pytorch_lightning": "pytorch-lightning"}
"""Each namespace, with the distribution that holds it."""
OF_LIGHTNING = tuple(f"{root}." for root in ROOTS)
"""The beginnings of the names of Lightning's own modules."""


def roots() -> tuple[str, ...]:
    """The imported namespaces; if there are none, an installed one, which is imported now.

    Raises:
        VersionError: one of them is of a version that is not supported.
        ModuleNotFoundError: none is installed.
    """
    found = _imported() or _installed()[:1]
    # Also those that only another library has imported: the trainer may be of any of them.
    for root in found:
        require(ROOTS[root], importlib.import_module(root).__version__)
    return found


def refuse_unsupported() -> None:
    """Refuse versions of Lightning with which no callback could be made, without importing any.

    Raises:
        VersionError: every namespace that the script may use is of such a version.
        ModuleNotFoundError: none is installed.
    """
    errors = []
    for root in _imported() or _installed():
        try:
            require(ROOTS[root], _version(root))
        except VersionError as error:
            errors.append(error)
        else:
            return
    raise errors[0]


def _imported() -> tuple[str, ...]:
    return tuple(root for root in ROOTS if sys.modules.get(root))


def _installed() -> tuple[str, ...]:
    """The namespaces that can be imported, the preferred one first."""
    found = tuple(root for root in ROOTS if importlib.util.find_spec(root.partition(".")[0]))
    if not found:
        raise ModuleNotFoundError(
            "optuna_hermes.lightning needs Lightning, which is not installed: run `pip install "
            "'optuna-hermes[lightning]'`.",
            name="lightning",
        )
    return found


def _version(root: str) -> str:
    """The version of a namespace, without importing it."""
    if sys.modules.get(root):
        return str(sys.modules[root].__version__)
    return importlib.metadata.version(ROOTS[root])


def part(owner: object, name: str) -> ModuleType:
    """Import a module, by its name below ``lightning.pytorch``, of a trainer's Lightning."""
    return importlib.import_module(f"{_root_of(owner)}.{name}")


def parts(name: str) -> list[ModuleType]:
    """Import a module, by its name as in ``part``, of each Lightning in ``roots``."""
    return [importlib.import_module(f"{root}.{name}") for root in roots()]


def wrap(owner: Any, method: str, call: Callable[..., Any], argument: object) -> None:
    """Replace a class's method by ``call(self, method, argument, ...)``, once."""
    present = inspect.getattr_static(owner, method)
    # A partialmethod: an earlier call has wrapped it.
    if not isinstance(present, functools.partialmethod):
        setattr(owner, method, functools.partialmethod(call, present, argument))


def callbacks_of(trainer: Any, kind: type[Any] = object) -> list[Any]:
    """The callbacks of a kind in a trainer, in its order."""
    return [each for each in trainer.callbacks if isinstance(each, kind)]


def _root_of(owner: object) -> str:
    return next(
        root
        for kind in type(owner).__mro__
        for root in ROOTS
        if kind.__module__.startswith(f"{root}.")
    )


class _Named(type):
    """Metaclass of stand-ins, for ``isinstance`` with Lightning's classes of the same name."""

    def __instancecheck__(cls, each: object) -> bool:
        return issubclass(type(each), cls)

    def __subclasscheck__(cls, kind: type) -> bool:
        return any(
            base.__qualname__ == cls.__name__ and base.__module__.startswith(OF_LIGHTNING)
            for base in kind.__mro__
        )


@functools.cache
def _named(name: str) -> type:
    return _Named(name, (), {})


def _joined(cls: type, callbacks: tuple[type, ...]) -> type:
    """The class of the same name that is also derived from these callback classes."""
    # Not from a cache, which would keep a class that the objective has made.
    known: list[type] = cls.__subclasses__()
    for each in known:
        if "_made_as" in vars(each) and each.__bases__ == (cls, *callbacks):
            return each
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "_made_as": cls}
    return type(cls.__name__, (cls, *callbacks), names)


def _callback_of(root: str) -> type:
    kind: type = sys.modules[root].Callback
    return kind
