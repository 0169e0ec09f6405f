"""Iterators around the epochs and the batches of a trial that has come back from disk."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
import tqdm

from optuna_hermes.errors import Suspended
from optuna_hermes.pytorch import PyTorchLoop
from optuna_hermes.testing import FakeSession
from support.loops import by_way_of_disk


@pytest.mark.parametrize("case", ["zip", "zip of a generator", "sum"])
def test_iterators_around_the_batches_of_a_resumed_epoch(case: str, tmp_path: Path) -> None:
    """They are seen there, too: such an epoch, in which no batch was trained, is not stored."""

    def loop(session: FakeSession) -> list[float]:
        run = PyTorchLoop(optuna.create_study().ask(), {}, session)
        seen: list[float] = run.kept.setdefault("seen", [])

        def step(batch: float) -> float:
            seen.append(batch)
            session.tick()
            return batch

        for _ in run.epochs(3):
            batches = run.batches([1.0, 2.0, 3.0])
            if case == "sum":
                sum(step(each) for each in batches)
            else:
                items = iter(batches) if case == "zip" else (each for each in batches)
                for batch, number in zip(items, range(3), strict=False):
                    step(batch + number)
            run.report(1.0)
        return seen

    session = FakeSession({3: "disk"}, checkpoint_dir=tmp_path / "study" / "trial")
    with pytest.raises(Suspended):
        loop(session)
    session = session.again({1: "disk"})
    assert loop(session) == loop(FakeSession())
    assert session.parks == ["resident"]


COUNTING: dict[str, Callable[[Any], Any]] = {
    "enumerate": enumerate,
    "from one": lambda items: enumerate(items, 1),
    "in a bar": lambda items: tqdm.tqdm(enumerate(items), file=io.StringIO()),
}


@pytest.mark.parametrize("stops", [(2, 1, 4), (3, 3), (7, 1)], ids=str)
@pytest.mark.parametrize("case", COUNTING)
def test_enumerate_counts_on(case: str, stops: tuple[int, ...], tmp_path: Path) -> None:
    """Right around the epochs and the batches, whose first ones another process has trained."""

    def loop(session: FakeSession) -> list[Any]:
        run = PyTorchLoop(optuna.create_study().ask(), {}, session)
        seen: list[Any] = run.kept.setdefault("seen", [])
        for number, epoch in COUNTING[case](run.epochs(range(5, 9))):
            for count, batch in COUNTING[case](run.batches([1.0, 2.0, 3.0])):
                seen.append([number, epoch, count, batch])
                session.tick()
            run.report(0.0)
        return seen

    assert by_way_of_disk(loop, tmp_path, *stops) == loop(FakeSession())


def test_enumerate_counts_epochs_without_batches_on(tmp_path: Path) -> None:
    """Those that another process has trained, too."""

    def loop(session: FakeSession) -> list[Any]:
        run = PyTorchLoop(optuna.create_study().ask(), {}, session)
        seen: list[Any] = run.kept.setdefault("seen", [])
        for number, epoch in enumerate(run.epochs(5)):
            seen.append([number, epoch])
            session.tick()
            run.report(0.0)
        return seen

    assert by_way_of_disk(loop, tmp_path, 2, 1) == [[each, each] for each in range(5)]
