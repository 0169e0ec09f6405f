"""Checkpoints of a Lightning training: Lightning's own, with the state that it leaves out."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optuna_hermes._lightning._callbacks import found_by, skip_tuners
from optuna_hermes._lightning._loggers import logger_state, restore_loggers, rewind_loggers
from optuna_hermes._lightning._loops import add_up, code_of, loop_state, restore_loop_state
from optuna_hermes._lightning._module_hooks import with_names
from optuna_hermes._lightning._namespace import callbacks_of
from optuna_hermes._lightning._optimizers import (
    beside_own_states,
    inner_states,
    put_references,
    restore_optimizers,
)
from optuna_hermes._lightning._pruning import lottery_state, restore_lottery
from optuna_hermes._lightning._trainer_hooks import TrainerHooks
from optuna_hermes.model import Checkpoint
from optuna_hermes.suspend import kept_rng, rng_state, set_rng_state
from optuna_hermes.suspend._modules._module_state import (
    all_buffers,
    drop_buffers,
    left_out,
    set_buffers,
    set_parameters,
)
from optuna_hermes.suspend._values._generators import FoundGenerators, set_states
from optuna_hermes.suspend._values._tree import frozen

if TYPE_CHECKING:
    from optuna_hermes._lightning._devices import ElasticDevices
    from optuna_hermes.suspend._ranks._rank import Rank

_KEY, _RANKS = "optuna_hermes", "ranks"

Tree = dict[str, Any]


class Checkpoints:
    """The checkpoints of one trial, in its only process or in one of its ranks."""

    def __init__(self, trial: str) -> None:
        self.elastic_devices: ElasticDevices | None = None
        """Set if the trial's number of devices may change."""
        self._name = trial
        self._found: tuple[Checkpoint, Tree] | None = None
        self._loaded: Tree | None = None
        self._code = FoundGenerators()

    @property
    def loaded(self) -> bool:
        """True while a resumed fit has not come to its first batch."""
        return self._loaded is not None

    def begin(self, found: tuple[Checkpoint, Tree] | None) -> None:
        self._found = found

    def forget(self) -> None:
        self._found = None

    def leave(self) -> None:
        """Drop the checkpoint that was loaded, at the end of a fit."""
        self._loaded = None
        self._code = FoundGenerators()  # which could not be pickled for ranks of a next fit

    def dump(self, hooks: TrainerHooks, rng: Tree, rank: Rank | None) -> Tree:
        """The trial's present state as a tree; of a rank, its own part."""
        trainer = hooks.trainer
        module = trainer.lightning_module
        checkpoint, hooked = hooks.dump()
        for each in (checkpoint, hooked or {}):
            put_references(trainer, each)
        first = rank is None or rank.rank == 0
        own = checkpoint[_KEY] = {
            "rng": rng,
            "loop": loop_state(trainer),
            "code": self._code.states(functools.partial(code_of, trainer)),
            "loggers": logger_state(trainer),
            "unsaved": hooks.unsaved.state_dict(),
            "loaders": hooks.loaders.state_dict(),
            "tuners": found_by(callbacks_of(trainer)),
            "lottery": lottery_state(trainer),
            "settings": hooks.settings.changed(),
            # Lightning's files are of the first rank.
            "hooked": with_names(hooked) if first else None,
            # DDP keeps parameters and optimizers equal on all ranks.
            "left_out": left_out(module, checkpoint["state_dict"]) if first else {},
            "inner": inner_states(trainer) if first else {},
            "beside": beside_own_states(trainer) if first else [],
        }
        if self.elastic_devices is not None:
            own["seed"] = self.elastic_devices.seed
        own["buffers"] = dict(all_buffers(module))
        if rank is None:
            for name in checkpoint["state_dict"]:  # left are those that are not persistent
                own["buffers"].pop(name, None)
            return checkpoint
        # Of a rank all, such as running statistics: DDP overwrites them by rank 0's at its start.
        from optuna_hermes._lightning._ddp import own_part

        return own_part(checkpoint, module, rank.rank)

    def resume(self, hooks: TrainerHooks, rank: Rank | None) -> None:
        """Make ``fit`` resume from the checkpoint that was found; for ``setup``.

        Raises:
            CheckpointError: another number of ranks wrote it, and their number cannot change.
        """
        if self._found is None:
            return
        (state, checkpoint), self._found = self._found, None
        elastic_devices, others = self.elastic_devices, checkpoint.pop(_RANKS, [])
        gone: list[Tree] = []
        of_first = checkpoint[_KEY]
        hooked, left = of_first.pop("hooked"), of_first["left_out"]
        if rank is not None or others:
            from optuna_hermes._lightning._ddp import part_of  # lazy: most have one process

            any_count = elastic_devices is not None
            checkpoint, gone = part_of(checkpoint, others, rank, self._name, any_count=any_count)
        self._loaded = loaded = checkpoint.pop(_KEY)
        loaded["gone"] = [part[_KEY]["loop"] for part in gone]
        own = of_first["inner"], of_first["beside"]
        loaded["optimizers"] = checkpoint["optimizer_states"], *own
        loaded["left_out"] = left
        if elastic_devices is not None:
            elastic_devices.seed = loaded.get("seed", elastic_devices.seed)
        loaded["changed"] = len(others) + 1 != (1 if rank is None else rank.count)
        if rank is not None and rank.rank > len(others):
            # It has accumulated no metrics in this epoch.
            loaded["rng"], loaded["loop"] = None, {**loaded["loop"], "metrics": {}, "results": []}
        hooks.settings.restored = loaded["settings"]
        hooks.loaders.resume(None if loaded["changed"] else loaded["loaders"]["made"])
        hooks.resume_from(checkpoint, Path(state.path), hooked, strict=not left)
        for callback, begin in skip_tuners(hooks.trainer, loaded["tuners"]):
            hooks.override(callback, "on_fit_start", begin)
        restore_loggers(hooks.trainer, loaded["loggers"])

    def pass_over(self, hooks: TrainerHooks) -> None:
        """Pass over the trained batches of an iterable data set; for ``on_train_start``."""
        loaded = self._loaded
        if loaded is None or loaded["rng"] is None or not hooks.loaders.has_streams():
            return
        # First what the data set draws from, and the random state, for a batch that Lightning
        # fetches ahead and that had not been fetched before.
        hooks.unsaved.load_state_dict(frozen(loaded["unsaved"]))
        with kept_rng():
            set_rng_state(loaded["rng"])
            hooks.loaders.pass_over(loaded["loaders"])
            loaded["rng"] = rng_state()

    def restore(self, hooks: TrainerHooks) -> None:
        """Restore the state that Lightning's own loading leaves out; before the first batch."""
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            self._put_back(loaded, hooks)
        hooks.unsaved.begin(resumed=loaded is not None)

    def _put_back(self, loaded: Tree, hooks: TrainerHooks) -> None:
        trainer = hooks.trainer
        hooks.end_resume()
        if loaded["rng"] is not None:  # before those of data, which may draw from the same
            set_states(code_of(trainer), loaded["code"])
        restore_optimizers(trainer, *loaded["optimizers"])
        restore_lottery(trainer, loaded["lottery"])
        restore_loop_state(trainer, loaded["loop"])
        add_up(trainer, loaded["gone"])
        if loaded["rng"] is not None:
            hooks.loaders.load_state_dict(loaded["loaders"])
        hooks.settings.restore()
        if loaded["changed"]:
            hooks.follow_sync_dist()
        rewind_loggers(trainer, loaded["loggers"])
        set_parameters(trainer.lightning_module, loaded["left_out"])
        set_buffers(trainer.lightning_module, loaded["buffers"])
        drop_buffers(trainer.lightning_module, loaded["buffers"])
        hooks.unsaved.load_state_dict(loaded["unsaved"])
        # Last, as the steps above may draw random numbers.
        if loaded["rng"] is not None:
            set_rng_state(loaded["rng"])
        elif self.elastic_devices is not None:
            self.elastic_devices.seed_new(trainer)

    def __setstate__(self, state: Tree) -> None:
        # A copy: tensors that torch has pickled for ``spawn`` share memory with all ranks.
        vars(self).update(state, _found=frozen(state["_found"]))


def merged(parts: list[Tree]) -> Tree:
    """The checkpoint of a trial, made of the parts of its ranks."""
    return {**parts[0], _RANKS: parts[1:]}
