"""Processes of one trial agree on where they stop, and never wait for one that is gone."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch  # before the fork, or else every rank imports it
from hypothesis import given, settings
from hypothesis import strategies as st

from optuna_hermes.errors import MonitorError, Suspended
from optuna_hermes.suspend._ranks import _parent as _ranks
from optuna_hermes.suspend._ranks._parent import Ranks
from optuna_hermes.suspend._ranks._rank import YIELD, Rank
from optuna_hermes.testing import FakeSession

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

RANKS = 2
FORK = multiprocessing.get_context("fork")


class Place:
    """State that a rank dumps where it stops: its number and its point."""

    name = "trial 1"
    units = 0
    can_store = True

    def __init__(self, rank: Rank, point: int, ended: bool = False) -> None:
        self._tree = {"rank": rank.rank, "point": torch.tensor(point)}
        self._ended = ended

    def ended(self) -> bool:
        return self._ended

    def waits(self) -> None:
        """See ``CleanPoint``."""

    def saved(self) -> None:
        """See ``CleanPoint``."""

    def dump(self) -> dict[str, Any]:
        return self._tree


class Asking(FakeSession):
    """Wants the device back from the beginning, so many times; keeps what was dumped then."""

    def __init__(self, times: int = 1, error: BaseException | None = None) -> None:
        super().__init__()
        self.must_yield = times > 0
        self.stops: list[Any] = []
        self._times = times
        self._error = error

    def park(self, state: Any) -> None:
        self.stops.append(state.dump()["all"])
        self.must_yield = len(self.stops) < self._times
        if self._error is not None:
            raise self._error


class Run:
    """Forks a process for each rank, and waits for what they return or raise.

    Args:
        body: what a rank does.
        session: its trial's.
        prunes: whether the trial is pruned.
        count: of the ranks.
    """

    def __init__(
        self,
        body: Callable[[Rank], Any],
        session: FakeSession | None,
        prunes: bool = False,
        count: int = RANKS,
    ) -> None:
        self.values: list[float] = []
        self.saves: list[Any] = []
        self.ranks = Ranks(
            count,
            FORK,
            trial="trial 1",
            session=session,
            all_started=lambda: None,
            report=lambda unit, value: self.values.append(value) or prunes,
            save=lambda tree, units: self.saves.append((units, tree["all"])),
            settle=lambda: self.saves.append("settled"),
            merge=lambda trees: {"all": trees},
        )
        results = [FORK.Pipe(duplex=False) for _ in range(count)]
        processes = [
            FORK.Process(target=self._be, args=(body, rank, results[rank][1]))
            for rank in range(count)
        ]
        for process in processes:
            process.start()
        for _, end in results:
            end.close()
        for process in processes:
            process.join()
        self.results = [_received(end) for end, _ in results]
        self.ranks.close()

    def _be(self, body: Callable[[Rank], Any], number: int, results: Any) -> None:
        rank = self.ranks.channels.become_rank(number)
        try:
            results.send(body(rank))
            rank.ended({"rank": number}, whole=True)
        except BaseException as error:
            results.send(repr(error))


def _received(end: Any) -> Any:
    try:
        return end.recv()
    except EOFError:
        return None


def loop(
    synced: Sequence[bool], clean: Sequence[bool], tries: int | None = None
) -> Callable[[Rank], int]:
    """Batches, some of which synchronise the ranks, and points between them, some of them clean.

    They begin when the trial must yield, and are repeated until a rank has tried to stop often
    enough, if that is said. Gives the number of batches.
    """
    barrier = FORK.Barrier(RANKS)

    def train(rank: Rank) -> int:
        while not rank._flags[YIELD]:
            pass
        left, point = tries, 0
        for syncs, stops in itertools.cycle(zip(synced, clean, strict=True)):
            if left == 0 or (tries is None and point == len(synced)):
                break
            point += 1
            rank.pass_point()
            if rank.must_yield and stops:
                rank.park(Place(rank, point))
                left = None if left is None else left - 1
            if syncs:
                barrier.wait(30)
        return point

    return train


def stops(session: Asking) -> list[int]:
    """The points at which all ranks have stopped, the same for each."""
    for trees in session.stops:
        assert [tree["rank"] for tree in trees] == list(range(RANKS))
        assert len({int(tree["point"]) for tree in trees}) == 1, trees
    return [int(trees[0]["point"]) for trees in session.stops]


def test_all_stop_at_the_point_after_the_one_where_rank_0_noticed() -> None:
    """No rank has to try twice where every batch synchronises, and all can stop again."""
    session = Asking(times=3)
    run = Run(loop([True], [True], tries=3), session)
    found = stops(session)
    assert found == sorted(set(found))
    assert run.results == [found[2]] * RANKS


def test_all_stop_at_the_same_clean_point() -> None:
    """With accumulated gradients only the first point of a window will do."""
    session = Asking(times=2)
    Run(loop([False, False, True], [True, False, False], tries=2), session)
    assert [point % 3 for point in stops(session)] == [1, 1]


@given(synced=st.lists(st.booleans(), min_size=40, max_size=40))
@settings(max_examples=15)
def test_all_stop_at_the_same_point_whatever_synchronises_them(synced: list[bool]) -> None:
    """No batch is taken for granted to do it: then a rank has waited for a while in vain."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_ranks, "RANK_ANSWER_SECONDS", 0.02)
        session = Asking()
        run = Run(loop(synced * 5, [True] * 200), session)
    assert len(stops(session)) == 1 or not any(synced)
    assert run.results == [200] * RANKS


def test_a_rank_that_is_ahead_is_met_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits in a collective operation while rank 0 waits to be parked: rank 0 trains on."""
    monkeypatch.setattr(_ranks, "RANK_ANSWER_SECONDS", 0.02)
    ahead, together = FORK.Event(), FORK.Barrier(RANKS)

    def train(rank: Rank) -> None:
        for point in range(1, 10):
            if rank.rank == 0:
                ahead.wait(30)
            rank.pass_point()
            if rank.must_yield:
                rank.park(Place(rank, point))
            if rank.rank == 1 and point == 6:
                ahead.set()
            if point == 6:
                together.wait(30)

    session = Asking()
    Run(train, session)
    (point,) = stops(session)
    assert point >= 7


@pytest.mark.parametrize("lead", [1, 3, 8])
def test_a_rank_that_is_ahead_is_met_where_it_is(
    lead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with NCCL: it waits within a batch for rank 0, which stops at once where that one can."""
    monkeypatch.setattr(_ranks, "RANK_ANSWER_SECONDS", 1000.0)
    ahead, together = FORK.Event(), FORK.Barrier(RANKS)

    def train(rank: Rank) -> None:
        if rank.rank == 0:
            assert ahead.wait(30)
            while not rank._flags[YIELD]:
                pass
        for point in range(1, 20):
            rank.pass_point()
            if rank.must_yield:
                rank.park(Place(rank, point))
            if rank.rank == 1 and point == 1 + lead:
                ahead.set()
            if point == 1 + lead:
                together.wait(30)

    session = Asking()
    Run(train, session)
    assert stops(session) == [2 + lead]


@pytest.mark.parametrize("seed", range(3))
def test_ranks_that_only_queue_their_gradients_stop_at_the_same_batch(
    seed: int, tmp_path: Path
) -> None:
    """They are batches apart when the trial must yield, and end as if it never had to."""
    whole = Run(Ahead(tmp_path / "whole", seed), FakeSession(), count=3)
    session = Asking(times=6)
    stopped = Run(Ahead(tmp_path / "stopped", seed), session, count=3)
    assert whole.results == stopped.results
    assert len(set(whole.results)) == 1
    assert len(session.stops) == 6
    for trees in session.stops:
        first, *others = trees
        for tree in others:
            assert tree["point"] == first["point"]
            assert torch.equal(tree["weight"], first["weight"])
    resumed = Run(Ahead(tmp_path / "resumed", seed, session.stops[3]), FakeSession(), count=3)
    assert resumed.results == whole.results


class Ahead:
    """A training over gloo whose ranks take different times for a batch.

    Like NCCL's, its gradients are only queued to be synchronised: a rank waits for those of a batch
    ``LAG`` batches later.

    Args:
        meet: a file at which the ranks meet.
        start: the states of the ranks to go on from.
    """

    BATCHES, LAG = 60, 4

    def __init__(self, meet: Path, seed: int, start: list[Any] | None = None) -> None:
        self._meet = meet
        self._seed = seed
        self._start = start

    def __call__(self, rank: Rank) -> str:
        import torch.distributed as dist

        url = f"file://{self._meet}"
        dist.init_process_group("gloo", init_method=url, rank=rank.rank, world_size=rank.count)
        delays = random.Random(f"{self._seed} {rank.rank}")
        weight, point, queued = torch.zeros(8), 0, deque[Any]()
        if self._start is not None:
            own = self._start[rank.rank]
            weight, point = own["weight"], own["point"]
            queued.extend((None, gradient) for gradient in own["queued"])
        place = _Between(weight, queued)
        while point < self.BATCHES:
            point += 1
            place.point = point - 1
            rank.pass_point()
            if rank.must_yield:
                rank.park(place)
            # Not to wait for anything: ranks that take as long as each other are never apart.
            time.sleep(delays.choice([0.0, 0.0, 0.001, 0.01]))
            noise = torch.Generator().manual_seed(1000 * rank.rank + point)
            gradient = torch.randn(8, generator=noise) + weight
            queued.append((dist.all_reduce(gradient, async_op=True), gradient))
            while len(queued) > (0 if point == self.BATCHES else self.LAG):
                work, gradient = queued.popleft()
                if work is not None:
                    work.wait()
                weight -= 0.01 * gradient
        return weight.numpy().tobytes().hex()


class _Between:
    """The state of an ``Ahead`` between two batches."""

    name = "trial 1"
    units = 0
    can_store = True

    def __init__(self, weight: torch.Tensor, queued: deque[Any]) -> None:
        self.point = 0
        self._weight = weight
        self._queued = queued

    def ended(self) -> bool:
        return False

    def waits(self) -> None:
        """See ``CleanPoint``."""

    def saved(self) -> None:
        """See ``CleanPoint``."""

    def dump(self) -> dict[str, Any]:
        # As waiting for a device does. It would never end if a rank had queued more than another.
        for work, _ in self._queued:
            if work is not None:
                work.wait()
        gradients = [gradient for _, gradient in self._queued]
        return {"point": self.point, "weight": self._weight, "queued": gradients}


def test_only_rank_0_speaks() -> None:
    """The session hears of the first batch and of progress once."""

    def body(rank: Rank) -> None:
        rank.training(can_store=True)
        rank.beat(100)

    session = FakeSession()
    Run(body, session)
    assert session.trainings == [True]
    assert session.beats == [100]


@pytest.mark.parametrize("prunes", [False, True])
def test_all_learn_whether_the_trial_is_pruned(prunes: bool) -> None:
    """The value of rank 0 is reported, once, and all get the answer."""
    run = Run(lambda rank: (rank.reported(1, 0.5 + rank.rank), rank.leaves), None, prunes)
    assert run.values == [0.5]
    assert run.results == [(prunes, prunes)] * RANKS


def test_a_wait_for_an_answer_is_no_reason_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has long waited for the others with its report trains on as usual."""
    monkeypatch.setattr(_ranks, "RANK_ANSWER_SECONDS", 0.0)

    def body(rank: Rank) -> bool:
        rank.pass_point()
        if rank.rank == 0:
            time.sleep(0.1)  # it is busy
        rank.reported(1, 0.5)
        rank.pass_point()
        return rank.must_yield

    assert Run(body, FakeSession()).results == [False] * RANKS


def test_one_checkpoint_is_made_of_all() -> None:
    """The parts come in the order of the ranks."""
    run = Run(lambda rank: rank.copy({"rank": rank.rank}, units=4), FakeSession())
    assert run.saves == [(4, [{"rank": 0}, {"rank": 1}])]


def test_all_learn_if_one_cannot_be_stored() -> None:
    """A rank that did not yield at a point, unlike the other, asks there once all the same."""

    def body(rank: Rank) -> list[bool]:
        rank.pass_point()
        rank.can_store = rank.rank == 0
        if rank.rank == 0:
            rank.park(Place(rank, 1))  # in vain: it is told to go on
        found = [rank.all_can_store(4) for _ in range(1 + rank.rank)]
        rank.pass_point()
        rank.can_store = True
        return [*found, rank.all_can_store(4)]

    assert Run(body, FakeSession()).results == [[False, True], [False, False, True]]


def test_a_value_that_not_all_have_is_refused() -> None:
    """One that nobody has is none; nobody waits for ever for what another does not report."""

    def body(rank: Rank) -> None:
        assert not rank.reported(0, None)
        rank.reported(1, 0.5 if rank.rank == 1 else None)

    run = Run(body, None)
    assert isinstance(run.ranks.error, MonitorError)
    assert run.values == []
    assert all("Suspended" in result for result in run.results)


def test_what_was_saved_is_safe_before_the_trial_is_stored() -> None:
    """Else an older state could be written after a newer one, and be numbered as the newest."""

    class Stored(Asking):
        def park(self, state: Any) -> None:
            assert state.saved() is None
            super().park(state)

    stop = loop([True], [True], tries=1)

    def body(rank: Rank) -> Any:
        rank.copy({"rank": rank.rank}, units=4)
        return stop(rank)

    run = Run(body, Stored())
    assert run.saves == [(4, [{"rank": 0}, {"rank": 1}]), "settled"]


def test_all_leave_when_the_trial_is_stored() -> None:
    """The exception that the session raises is kept, and every rank unwinds."""
    run = Run(loop([True], [True], tries=1), Asking(error=Suspended("on disk")))
    assert repr(run.ranks.error) == "Suspended('on disk')"
    assert all("Suspended" in result for result in run.results)


@pytest.mark.parametrize("kind", ["park", "report"])
def test_nobody_waits_for_a_rank_that_is_gone(kind: str) -> None:
    """A rank that is killed ends the wait of the others."""

    def body(rank: Rank) -> None:
        if rank.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "park":
            rank.park(Place(rank, 1))
        rank.reported(1, 0.5)

    run = Run(body, FakeSession())
    assert "Suspended" in run.results[0]
    assert run.results[1] is None


def test_a_rank_that_is_told_to_end_does_so_while_it_waits() -> None:
    """SIGTERM is seen though the signal handler of the loop only makes a note of it."""

    ended = FORK.Event()

    def body(rank: Rank) -> None:
        if rank.rank == 1:
            assert ended.wait(30)
            return
        try:
            rank.park(Place(rank, 1, ended=True))
        finally:
            ended.set()

    assert Run(body, FakeSession()).results == ["SystemExit(143)", None]


def test_what_is_sent_after_the_last_look_is_read(
    monkeypatch: pytest.MonkeyPatch, wait_for: Callable[..., None]
) -> None:
    """The listener has found nothing, and goes on only once the ranks have ended."""
    looked, ended, look = threading.Event(), threading.Event(), _ranks.wait

    def late(ends: Any, timeout: float) -> Any:
        found = look(ends, timeout)
        looked.set()
        assert ended.wait(30)
        return found

    monkeypatch.setattr(_ranks, "wait", late)
    options = dict.fromkeys(("all_started", "report", "save", "settle", "merge"), Mock())
    ranks = Ranks(1, FORK, trial="trial 1", session=None, **options)
    assert looked.wait(30)
    ranks.channels.rank_ends[0].send(("ended", (0, {"rank": 0}, True)))
    closing = threading.Thread(target=ranks.close)
    closing.start()
    wait_for(ranks.closing, 30)
    ended.set()
    closing.join()
    assert ranks.end == {"rank": 0}


class MadeError(Exception):
    """One that pickle takes, and cannot make again."""

    def __init__(self, text: str, number: int) -> None:
        super().__init__(text)


def test_the_first_error_counts() -> None:
    """A rank's error is known where the ranks were started; one that cannot be sent is not."""

    def body(rank: Rank) -> None:
        error = LookupError("first") if rank.rank == 0 else LookupError(threading.Lock())
        rank.raised(MadeError("not made again", 1))
        rank.raised(error)

    assert repr(Run(body, FakeSession()).ranks.error) == "LookupError('first')"


def test_the_error_that_came_first_counts_though_it_is_read_last() -> None:
    """The end of a connection, say, is read before the error in the rank at its other end."""
    sent = FORK.Event()

    def body(rank: Rank) -> None:
        if rank.rank == 0:
            rank.raised(RuntimeError("connection closed"))
            sent.set()
            return
        assert sent.wait(30)
        with patch("time.monotonic", return_value=0.0):
            rank.raised(LookupError("cause"))

    assert repr(Run(body, FakeSession()).ranks.error) == "LookupError('cause')"


def test_rank_0_has_the_last_word() -> None:
    """The end that it reports is kept."""
    assert Run(lambda rank: None, None).ranks.end == {"rank": 0}
