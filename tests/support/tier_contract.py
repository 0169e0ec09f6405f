"""Contract tests for tiers."""

from __future__ import annotations

import functools
import gc
import hashlib
import random
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import pytest
import torch
from torch import nn

from optuna_hermes.errors import SuspendError
from optuna_hermes.suspend import CleanPoint, Footprint, kept_rng, rng_state, set_rng_state

STEPS = 30
SEED = 3


class Tier(Protocol):
    """A place where a suspended trial waits: on its device, in host memory, or on disk.

    One object serves one trial, any number of times. ``suspend`` and ``resume`` alternate. The
    caller keeps the random states around the two: those in ``dump`` are only read again when the
    trial is resumed from that tree.
    """

    def suspend(self, state: CleanPoint) -> Footprint:
        """Put the trial into this tier, and return what it still takes.

        Raises:
            SuspendError: it cannot be put there; it is as it was.
        """

    def resume(self) -> dict[str, Any] | None:
        """Bring the trial back.

        Returns:
            None if every tensor is where it was, with the same values; else the tree that
            ``dump`` gave, to be loaded into new objects.

        Raises:
            SuspendError: it cannot be brought back from there.
        """


class Net(nn.Module):
    """A network with batch statistics, dropout, and a weight that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.3)
        self.last = nn.Linear(8, 8)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of 8 numbers to rows of 8 numbers."""
        result: torch.Tensor = self.last(self.dropout(self.norm(self.first(x)).relu()))
        return result


class Mean:
    """A metric that keeps a tensor in a plain attribute, as user code often does."""

    def __init__(self) -> None:
        self.total = torch.zeros(())
        self.count = 0

    def add(self, value: torch.Tensor) -> None:
        """Count one more value."""
        self.total = self.total + value
        self.count += 1


class Training:
    """A small training for a tier to suspend (``suspend.CleanPoint``).

    Args:
        seed: seed of its weights and of its random numbers.
    """

    name = "trial 7"

    def __init__(self, seed: int = SEED) -> None:
        torch.manual_seed(seed)
        self.can_store = self.can_offload = True
        self.net = Net()
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.05, STEPS)
        self.mean = Mean()
        self.losses: list[float] = []

    @property
    def units(self) -> int:
        """See ``CleanPoint``: a step is a unit."""
        return len(self.losses)

    def ended(self) -> bool:
        """See ``CleanPoint``."""
        return False

    def roots(self) -> Iterable[object]:
        """See ``CleanPoint``."""
        return [self.net, self.optimizer, self.scheduler, self.mean]

    def waits(self) -> None:
        """See ``CleanPoint``."""

    def saved(self) -> None:
        """See ``CleanPoint``."""

    def dump(self) -> dict[str, Any]:
        """See ``CleanPoint``; the random state is in it."""
        return {
            "net": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "mean": (self.mean.total, self.mean.count),
            "losses": self.losses,
            "rng": rng_state(),
        }

    def load(self, tree: dict[str, Any]) -> None:
        """Restore the state in ``tree``."""
        self.net.load_state_dict(tree["net"])
        self.optimizer.load_state_dict(tree["optimizer"])
        self.scheduler.load_state_dict(tree["scheduler"])
        self.mean.total, self.mean.count = tree["mean"]
        self.losses = list(tree["losses"])
        set_rng_state(tree["rng"])

    def train(self, steps: int) -> None:
        """Train until ``steps`` steps are done in all."""
        while self.units < steps:
            self.half_a_step()
            self.finish_step()

    def half_a_step(self) -> None:
        """Accumulate gradients of one half of a batch."""
        self.optimizer.zero_grad()
        torch.autograd.backward(self._loss() / 2)

    def finish_step(self) -> None:
        """Accumulate gradients of the other half, and step."""
        loss = self._loss() + 0.01 * self.mean.total / max(1, self.mean.count)
        torch.autograd.backward(loss / 2)
        self.optimizer.step()
        self.scheduler.step()
        self.mean.add(loss.detach())
        self.losses.append(loss.item())

    def tensors(self) -> list[torch.Tensor]:
        """All tensors that it has in memory."""
        parameters = list(self.net.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        slots = [value for slot in self.optimizer.state.values() for value in slot.values()]
        return [*parameters, *gradients, *self.net.buffers(), *slots, self.mean.total]

    def held_bytes(self) -> int:
        """Bytes of memory of its tensors now."""
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in self.tensors()}
        return sum(storage.nbytes() for storage in storages.values())

    def values(self) -> list[Any]:
        """All values that a suspension must not change."""
        return [self.losses, *(tensor.tolist() for tensor in self.tensors())]

    def _loss(self) -> torch.Tensor:
        x = torch.randn(16, 8) * float(np.random.uniform(0.9, 1.1)) + random.gauss(0, 0.01)
        return torch.nn.functional.mse_loss(self.net(x), x)


@functools.cache
def uninterrupted() -> list[Any]:
    """The final values of a training without suspensions."""
    _seed_others(SEED)
    training = Training()
    training.train(STEPS)
    return training.values()


def cycle(tier: Tier, training: Training) -> Training:
    """Suspend a training, let others draw random numbers, and bring it back."""
    with kept_rng():
        tier.suspend(training)
        _seed_others(17)
        torch.manual_seed(17)
        tree = tier.resume()
    if tree is None:
        return training
    again = Training(seed=99)
    again.load(tree)
    return again


def _seed_others(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)


def _tensors_alive() -> int:
    gc.collect()
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


class TierContract:
    """Subclass it, and give it a ``tier`` fixture: a new tier, for one trial, for each test.

    Example:
        >>> class TestMine(TierContract):
        ...     needs = "can_offload"
        ...     @pytest.fixture
        ...     def tier(self) -> Tier:
        ...         return HostTier()

    Args:
        needs: the permission of a ``CleanPoint`` that the tier needs, None if it takes every trial.
        in_place: whether a trial resumes in its own process, with its own tensors.
    """

    needs: Literal["can_offload", "can_store"] | None = None
    in_place: bool = True

    @pytest.fixture
    def tier(self) -> Tier:
        """Override it: the tier under test."""
        raise NotImplementedError("A TierContract needs a `tier` fixture.")

    @pytest.fixture
    def training(self) -> Iterator[Training]:
        """A training after its fifth step."""
        with kept_rng():
            uninterrupted()
            _seed_others(SEED)
            training = Training()
            training.train(5)
            yield training

    @pytest.mark.parametrize(
        "steps", [[5], [5, 5], list(range(5, 25))], ids=["once", "twice at one step", "20 times"]
    )
    def test_a_suspended_trial_ends_as_if_it_never_was(
        self, tier: Tier, training: Training, steps: list[int]
    ) -> None:
        """Losses, weights and other state equal those of an uninterrupted run, bit for bit."""
        for step in steps:
            training.train(step)
            training = cycle(tier, training)
        training.train(STEPS)
        assert training.values() == uninterrupted()

    def test_a_trial_comes_back_as_the_contract_says(self, tier: Tier, training: Training) -> None:
        """A trial resumes with its own tensors, or as a tree for another process."""
        tier.suspend(training)
        assert (tier.resume() is None) == self.in_place

    def test_tensors_are_the_same_again(self, tier: Tier, training: Training) -> None:
        """Objects, versions, views and shared weights are as before: references stay good."""
        self._only_in_place()
        before = [(id(tensor), tensor._version) for tensor in training.tensors()]
        view = training.net.first.weight.detach()[2:4]
        values = training.values()
        cycle(tier, training)
        assert [(id(tensor), tensor._version) for tensor in training.tensors()] == before
        assert training.values() == values
        with torch.no_grad():
            training.net.last.weight[2:4] = 7.0
        assert training.net.first.weight is training.net.last.weight
        assert view.tolist() == [[7.0] * 8] * 2

    def test_open_gradients_stay(self, tier: Tier, training: Training) -> None:
        """A trial may wait in the middle of an accumulation."""
        self._only_in_place()
        training.half_a_step()
        cycle(tier, training)
        training.finish_step()
        training.train(STEPS)
        assert training.values() == uninterrupted()

    def test_a_validation_may_be_interrupted(self, tier: Tier, training: Training) -> None:
        """A trial can be suspended in inference mode, and then validates and trains on."""
        self._only_in_place()
        training.net.eval()
        with torch.inference_mode():
            before = training.net(torch.ones(1, 8)).tolist()
            cycle(tier, training)
            assert training.net(torch.ones(1, 8)).tolist() == before
        training.net.train()
        cycle(tier, training)
        training.train(STEPS)
        assert training.values() == uninterrupted()

    def test_it_says_what_a_trial_takes(self, tier: Tier, training: Training) -> None:
        """The reported device bytes are those of its tensors, and no byte is missing."""
        before = training.held_bytes()
        held = tier.suspend(training)
        if held.stored is None:
            assert held.device_bytes == training.held_bytes()
            assert held.device_bytes + held.host_bytes >= before
            assert held.host_bytes == 0 or held.device_bytes < before
        else:
            content = Path(held.stored.path).read_bytes()
            assert (held.device_bytes, held.host_bytes) == (0, 0)
            assert held.stored.units == training.units
            assert held.stored.size_bytes == len(content)
            assert held.stored.sha256 == hashlib.sha256(content).hexdigest()

    def test_what_it_cannot_take_is_refused(self, tier: Tier, training: Training) -> None:
        """The error names the trial, which goes on unchanged."""
        if self.needs is None:
            pytest.skip("It takes every trial.")
        setattr(training, self.needs, False)
        with pytest.raises(SuspendError, match=f"(?i){training.name}"):
            tier.suspend(training)
        training.train(10)
        setattr(training, self.needs, True)
        training = cycle(tier, training)
        training.train(STEPS)
        assert training.values() == uninterrupted()

    def test_it_needs_nothing_else(self, tier: Tier, training: Training) -> None:
        """A tier uses no permission but the one that it needs."""
        training.can_offload = self.needs == "can_offload"
        training.can_store = self.needs == "can_store"
        training = cycle(tier, training)
        training.train(STEPS)
        assert training.values() == uninterrupted()

    def test_fifty_cycles_leave_nothing(self, tier: Tier, training: Training) -> None:
        """After fifty cycles tensors, threads and host memory are as before."""
        training = cycle(tier, training)
        first = self._takes(tier.suspend(training))
        tier.resume()
        before = _tensors_alive(), threading.enumerate()
        for _ in range(50):
            training = cycle(tier, training)
        assert (_tensors_alive(), threading.enumerate()) == before
        assert self._takes(tier.suspend(training)) == first

    def _only_in_place(self) -> None:
        if not self.in_place:
            pytest.skip("A trial comes back as a tree.")

    def _takes(self, held: Footprint) -> tuple[int, int]:
        return held.device_bytes, held.host_bytes
