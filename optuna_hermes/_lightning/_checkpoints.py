"""What a run writes down beside Lightning's own checkpoint, and how it goes on from there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Trainer

from optuna_hermes._lightning._ddp import (
    buffers,
    count_of,
    gone,
    own_part,
    part_of,
    restore_buffers,
)
from optuna_hermes._lightning._loggers import logger_state, restore_loggers, rewind_loggers
from optuna_hermes._lightning._loops import add_up, count_anew, loop_state, restore_loop_state
from optuna_hermes._lightning._pruning import lottery_state, restore_lottery
from optuna_hermes._lightning._tuners import tuner_state
from optuna_hermes._lightning._unsaved import WAY_OUT, unsaved
from optuna_hermes._lightning._wiring import Wiring
from optuna_hermes.suspend import Session, StoredState, read, set_rng_state
from optuna_hermes.suspend._rank import Rank
from optuna_hermes.suspend._said import say_lost
from optuna_hermes.suspend._tree import frozen
from optuna_hermes.suspend._unsaved import Unsaved

if TYPE_CHECKING:
    from optuna_hermes._lightning._devices import ElasticDevices

_KEY = "optuna_hermes"

Tree = dict[str, Any]


class Checkpoints:
    """Those of one run, in the process that it has or in one of its ranks.

    Args:
        run: whose they are, as a message names it.
        spreads: of a run whose number of devices may change; else None.
    """

    def __init__(self, run: str, spreads: ElasticDevices | None) -> None:
        self._run = run
        self._spreads = spreads
        self._found: tuple[StoredState, Tree] | None = None
        self._loaded: Tree | None = None
        self._unsaved = Unsaved({})
        self._folder: Path | None = None

    @property
    def loaded(self) -> bool:
        """Whether a fit goes on from one of them and has not come to its first batch."""
        return self._loaded is not None

    def find(self, session: Session) -> None:
        """Read the newest one.

        Raises:
            CheckpointError: there is one, and none can be read.
        """
        self._folder = session.checkpoint_dir
        self._found = read(session.checkpoints, self._run, session.checkpoint_dir)

    def forget(self) -> None:
        """The one that was found is of no use to the next fit."""
        self._found = None

    def leave(self) -> None:
        """The fit is over."""
        self._loaded = None

    def dump(self, trainer: Trainer, wiring: Wiring, rng: Tree, rank: Rank | None) -> Tree:
        """The run as it is now; of a rank, what it has of it."""
        checkpoint = wiring.dump()
        own = checkpoint[_KEY] = {
            "rng": rng,
            "loop": loop_state(trainer),
            "loggers": logger_state(trainer),
            "unsaved": self._unsaved.state_dict(),
            "loaders": wiring.loader_states(),
            "tuners": tuner_state(trainer),
            "lottery": lottery_state(trainer),
        }
        say_lost(self._run, self._folder, self._unsaved.lost, WAY_OUT)
        if self._spreads is not None:
            own["seed"] = self._spreads.seed
        if rank is None:
            return checkpoint
        module = trainer.lightning_module
        own["buffers"] = buffers(module)
        return own_part(checkpoint, module, rank.rank)

    def resume(self, trainer: Trainer, wiring: Wiring, rank: Rank | None) -> None:
        """Make ``fit`` go on from the one that was found; for ``setup``.

        Raises:
            CheckpointError: it is of more ranks, or of fewer, and their number cannot change.
        """
        if self._found is None:
            return
        (state, checkpoint), self._found = self._found, None
        number, count = (0, 1) if rank is None else (rank.rank, rank.count)
        spreads, before = self._spreads, count_of(checkpoint)
        checkpoint = part_of(checkpoint, number, count, self._run, any_count=spreads is not None)
        self._loaded = loaded = checkpoint.pop(_KEY)
        loaded["gone"] = [part[_KEY]["loop"] for part in gone(checkpoint)]
        if spreads is not None:
            spreads.seed = loaded.get("seed", spreads.seed)
        loaded["changed"] = before != count
        if number >= before:
            loaded["rng"], loaded["loop"] = None, count_anew(loaded["loop"])
        made = None if loaded["changed"] else loaded["loaders"]["made"]
        wiring.resume_from(checkpoint, state.path, made)
        wiring.skip_tuners(loaded["tuners"])
        restore_loggers(trainer, loaded["loggers"])

    def restore(self, trainer: Trainer, wiring: Wiring) -> None:
        """Give back what Lightning's own loading leaves out; before the first batch."""
        loaded, self._loaded = self._loaded, None
        self._unsaved = unsaved(trainer)
        if loaded is not None:
            self._put_back(loaded, trainer, wiring)
        self._unsaved.begin()

    def _put_back(self, loaded: Tree, trainer: Trainer, wiring: Wiring) -> None:
        wiring.hide_loader_states()
        wiring.restore_masks()
        restore_lottery(trainer, loaded["lottery"])
        restore_loop_state(trainer, loaded["loop"])
        add_up(trainer, loaded["gone"])
        if loaded["rng"] is not None:
            wiring.restore_loader_states(loaded["loaders"])
        if loaded["changed"]:
            wiring.follow_log()
        rewind_loggers(trainer, loaded["loggers"])
        if "buffers" in loaded:
            restore_buffers(trainer.lightning_module, loaded["buffers"])
        self._unsaved.load_state_dict(loaded.get("unsaved", {}))
        if loaded["rng"] is not None:
            set_rng_state(loaded["rng"])
        elif self._spreads is not None:
            self._spreads.seed_new(trainer)

    def __setstate__(self, state: Tree) -> None:
        # Pickled by torch, its tensors are shared by the ranks.
        vars(self).update(state, _found=frozen(state["_found"]))
