"""The points where Lightning starts processes, and the trials that may be trained in them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from optuna_hermes._lightning._namespace import Trainer, parts, wrap
from optuna_hermes.errors import InvalidInputError

if TYPE_CHECKING:
    from optuna_hermes.suspend._ranks._parent import Ranks
    from optuna_hermes.suspend._ranks._rank import Rank


class LaunchableLoop(Protocol):
    """The loop of a trial, as seen from the start of its ranks."""

    def ranks(self, count: int, context: Any) -> AbstractContextManager[Ranks]:
        """Listen to the ranks that are started within."""

    def be_rank(self, rank: Rank) -> None:
        """Continue in the process of a rank."""

    def leased(self) -> bool:
        """True if the trial has a session."""

    def state_dict(self) -> dict[str, Any]:
        """The state that a rank sends at its end."""


Find = Callable[[Trainer | None], LaunchableLoop | None]
"""Finds the loop of a trial in its trainer; None if it has none."""


def watch_launches(find: Find) -> None:
    """Wrap Lightning's launchers, for trainers in which there is a loop of a trial."""
    # Patched, since Lightning calls no hook before it starts processes.
    for name, module in (
        ("_MultiProcessingLauncher", "multiprocessing"),
        ("_SubprocessScriptLauncher", "subprocess_script"),
    ):
        for each in parts(f"strategies.launchers.{module}"):
            wrap(getattr(each, name), "launch", _launch, find)


def refused_strategy(strategy: object) -> InvalidInputError:
    """The error for a trial whose processes cannot be suspended together."""
    return InvalidInputError(
        "A trial in several processes must start them by itself to take turns, but strategy "
        f"{type(strategy).__name__} runs the script once more for each: give the Trainer "
        'strategy="ddp_fork".'
    )


def sharded_strategy(strategy: object) -> InvalidInputError:
    """The error for a trial whose strategy saves and loads its state in parts."""
    return InvalidInputError(
        "A trial must have its whole state in one place to be suspended, but strategy "
        f"{type(strategy).__name__} shards it, also on one device: leave the strategy out, or give "
        'the Trainer strategy="ddp_fork" for several devices.'
    )


def _launch(
    launcher: Any,
    launch: Callable[..., Any],
    find: Find,
    function: Any,
    /,
    *args: Any,
    trainer: Trainer | None = None,
    **kwargs: Any,
) -> Any:
    loop = find(trainer)
    if trainer is not None and loop is not None:
        scripts, fits = not hasattr(launcher, "_start_method"), trainer.state.fn == "fit"
        # Ranks that run the script once more, or on other hosts, cannot be suspended together.
        apart = trainer.world_size > 1 if scripts else fits and trainer.num_nodes > 1
        if apart and loop.leased():
            raise refused_strategy(trainer.strategy)
        if fits and not scripts:  # only ``fit`` is suspended, others are started as ever
            from optuna_hermes._lightning._ddp import launch_ranks  # lazy: most have one process

            return launch_ranks(launch, launcher, loop, function, *args, trainer=trainer, **kwargs)
    return launch(launcher, function, *args, trainer=trainer, **kwargs)
