"""Processes that share the batches of a loader see the same epochs, however many they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Sampler

from optuna_hermes.suspend._loaders._elastic import DividedSampler, share


class Loaders:
    """The loader of each process, with its position."""

    def __init__(
        self,
        count: int,
        *,
        seed: int = 5,
        epoch: int = 0,
        state: Any = None,
        options: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        self.done = 0
        self.loaders = []
        for rank in range(count):
            settings: dict[str, Any] = {
                "batch_size": 4,
                "shuffle": True,
                **options(),
            }  # processes have copies
            loader = DataLoader(list(range(18)), collate_fn=list, **settings)
            shares = DividedSampler(
                loader,
                lambda: self.done,
                epoch=lambda: epoch,
                seed=seed,
                rank=rank,
                count=count,
            )
            if state is not None:
                shares.load_state_dict(state)
                self.done = state["skip"]
            self.loaders.append((loader, shares))

    def train(self, batches: int | None = None) -> list[set[int]]:
        """The samples of each batch, of all processes together."""
        found: list[list[list[int]]] = []
        for rank, (loader, _) in enumerate(self.loaders):
            torch.manual_seed(rank)  # they differ in all else
            its = [batch for batch, _ in zip(loader, range(batches or 99), strict=False)]
            found.append(its)
        self.done += len(found[0])
        return [{n for part in parts for n in part} for parts in zip(*found, strict=True)]

    @property
    def state(self) -> Any:
        states = [shares.state_dict() for _, shares in self.loaders]
        assert all(s["skip"] == states[0]["skip"] for s in states)
        return states[0]


def test_an_epoch_is_the_same_for_any_number() -> None:
    """Batches of the same samples in the same order; another epoch, or another run, has others."""
    alone = Loaders(1).train()
    assert [len(batch) for batch in alone] == [4, 4, 4, 4, 2]
    assert set().union(*alone) == set(range(18))
    assert Loaders(2).train() == Loaders(4).train() == alone
    assert Loaders(1, epoch=1).train() != alone
    assert Loaders(1, seed=6).train() != alone


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3)])
def test_the_rest_of_an_epoch_goes_on(before: int, after: int) -> None:
    """The epoch goes on where another number of processes has stopped."""
    first = Loaders(before)
    begun = first.train(2)
    assert begun + Loaders(after, state=first.state).train() == Loaders(1).train()


def test_a_state_has_the_keys_of_checkpoints_that_are_stored() -> None:
    """A position of batches of one size has no keys of others."""
    keys = "skip before drawn ahead ended opened begin own seed workers"
    assert list(Loaders(1).state) == keys.split()


class Careless(Sampler[int]):
    """Draws each index when it is asked for it."""

    def __iter__(self) -> Any:
        for _ in range(18):
            yield int(torch.randint(18, ()))

    def __len__(self) -> int:
        return 18


@pytest.mark.parametrize(
    "options",
    [
        lambda: {"sampler": Careless(), "shuffle": None},
        lambda: {"generator": torch.Generator().manual_seed(3)},
        lambda: {"shuffle": False},
    ],
)
def test_any_sampler_will_do(options: Callable[[], dict[str, Any]]) -> None:
    """One that draws late, one with a generator of its own, and none."""
    first = Loaders(2, options=options)
    begun = first.train(2)
    again = Loaders(3, state=first.state, options=options)
    assert begun + again.train() == Loaders(1, options=options).train()


def test_every_part_has_the_same_length() -> None:
    """Some samples come twice where a batch cannot be divided, and two at least to each."""
    for length in range(1, 9):
        for count in range(1, 5):
            parts = [share(list(range(length)), rank, count) for rank in range(count)]
            assert len({len(part) for part in parts}) == 1
            assert len(parts[0]) >= min(2, length)
            assert {n for part in parts for n in part} == set(range(length))
            if length % count == 0 and length >= 2 * count:
                assert sum(map(len, parts)) == length
