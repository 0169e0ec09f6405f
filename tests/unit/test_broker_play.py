"""Whatever clients do, on GPUs of any size: the broker's rules hold, and every trial is trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from optuna_hermes.broker import _protocol as wire
from optuna_hermes.broker import _residency as residency
from optuna_hermes.broker._book import Run, Slot
from optuna_hermes.broker._events import Send
from optuna_hermes.model import Device, TierName
from optuna_hermes.policies import POLICIES
from optuna_hermes.testing import FakeBroker

UNITS = 3
N_TRIALS = 5


@dataclass
class Trial:
    """What a trial is like; ``stored`` are the units of its checkpoint."""

    need: int
    stores: bool
    moves: bool
    units: int = 0
    stored: int | None = None

    def checkpoint(self) -> wire.SavedCheckpoint:
        self.stored = self.units
        return wire.SavedCheckpoint(path="/c", units=self.units, size_bytes=1, sha256="0")


@dataclass
class Worker:
    """A process that behaves as clients do: one message after another, each when it likes."""

    connection: int
    number: int | None = None
    device: str = ""
    uses: int = 0
    epoch: int = 0
    alone: bool = False
    doing: str = "waits"  # "waits", "trains", "parked" or "leaves"
    hangs: bool = False
    tier: TierName = "resident"
    asked: TierName | None = None
    inbox: list[wire.FromBroker] = field(default_factory=list)
    seen: int = 0


class Play:
    """GPUs, processes and trials around a broker; a seeded generator takes all decisions."""

    def __init__(self, random: Random, *, policy: str, gpus: int, told: str) -> None:
        self.random = random
        self.told = told
        self.size = 10
        self.room = random.randint(1, 3)
        ids = [f"GPU-{index}" for index in range(gpus)]
        self.broker = FakeBroker(
            devices=[Device(id=id_, kind="gpu", free=True) for id_ in ids],
            host_budget_bytes=random.randint(0, 12),
            grace_seconds=5.0,
        )
        self.ids = ids
        self.max_alive = gpus + self.room
        self.trials = [
            Trial(
                need=random.randint(1, 8),
                stores=random.random() < 0.8,
                moves=random.random() < 0.7,
            )
            for _ in range(N_TRIALS * 4)
        ]
        self.workers: dict[int, Worker] = {}
        self.next_number = 0
        self.poll()
        self.broker.driver(
            policy=policy, unstarted=N_TRIALS, max_alive=self.max_alive, slice_seconds=1.0
        )

    # -- the world

    def used(self, device: str) -> int:
        return sum(w.uses for w in self.workers.values() if w.device == device)

    def poll(self) -> None:
        for id_ in self.ids:
            free = self.size - self.used(id_)
            self.broker.poll(
                id_,
                memory_bytes=None if self.told == "nothing" else self.size,
                memory_free_bytes=free if self.told == "all" else None,
            )

    def step(self, *, wild: bool) -> None:
        if len(self.workers) < self.max_alive:
            worker = Worker(self.broker.worker())
            self.workers[worker.connection] = worker
        begun = len(self.broker.log)
        self.poll()
        self.broker.advance(0.4)
        for pid in self.broker.killed():
            self.die(pid)
        for worker in list(self.workers.values()):
            if wild and self.random.random() < 0.4:
                continue  # late
            if wild and self.random.random() < 0.04:
                worker.hangs = True
            if wild and self.random.random() < 0.02:
                self.die(worker.connection)
            elif not worker.hangs:
                self.act(worker, wild=wild)
            self.check(begun)
            begun = len(self.broker.log)

    def calm_down(self) -> None:
        """Those who hang are killed by hand, but for those whom the broker waits for itself."""
        for worker in list(self.workers.values()):
            asked = worker.asked or any(not isinstance(m, wire.Grant) for m in worker.inbox)
            if worker.hangs and not (asked or worker.doing == "leaves"):
                self.die(worker.connection)

    def die(self, connection: int) -> None:
        worker = self.workers.pop(connection, None)
        if worker is None:
            return
        if worker.number is not None:
            trial = self.trials[worker.number]
            trial.units = trial.stored or 0
        self.poll()
        self.broker.hang_up(connection)

    def say(self, worker: Worker, message: wire.FromClient) -> None:
        self.poll()
        self.broker.say(worker.connection, message)

    # -- a client

    def act(self, worker: Worker, *, wild: bool) -> None:
        self.hear(worker)
        if worker.doing == "leaves":
            self.die(worker.connection)
        elif worker.doing == "trains":
            self.train(worker)
        elif worker.inbox:
            self.obey(worker, worker.inbox.pop(0), wild=wild)

    def hear(self, worker: Worker) -> None:
        sent = self.broker.sent(worker.connection)
        for message in sent[worker.seen :]:
            if isinstance(message, wire.Yield):
                worker.asked = message.tier
            elif isinstance(message, wire.Grant | wire.Evict | wire.Recall):
                assert not worker.inbox, "nobody is asked twice at once"
                worker.inbox.append(message)
        worker.seen = len(sent)

    def obey(self, worker: Worker, message: wire.FromBroker, *, wild: bool) -> None:
        if isinstance(message, wire.Evict):
            self.put(worker, message.tier, wild=wild)
        elif isinstance(message, wire.Recall):
            self.put(worker, "resident", wild=wild)
        elif isinstance(message, wire.Grant):
            self.take(worker, message)

    def take(self, worker: Worker, grant: wire.Grant) -> None:
        worker.epoch, worker.device, worker.alone = grant.epoch, grant.devices[0], grant.alone
        worker.asked = None
        if worker.number is None:
            worker.number = self.next_number if grant.number is None else grant.number
            self.next_number = max(self.next_number, worker.number + 1)
            begin = wire.Begin(epoch=worker.epoch, number=worker.number, trial_id=1)
            self.say(worker, begin)
        trial = self.trials[worker.number]
        if worker.doing == "parked" and worker.tier == "host" and not self.fit(worker, trial.need):
            self.put(worker, "disk", wild=False)
            return
        worker.doing = "trains"
        self.say(worker, wire.Training(epoch=worker.epoch, stores=trial.stores))

    def fit(self, worker: Worker, need: int) -> bool:
        return self.used(worker.device) - worker.uses + need <= self.size

    def train(self, worker: Worker) -> None:
        assert worker.number is not None
        trial, epoch = self.trials[worker.number], worker.epoch
        if not self.fit(worker, trial.need):
            worker.doing = "leaves"
            if worker.alone:
                self.say(worker, wire.Ended(epoch=epoch, state="failed", error="memory"))
            else:
                trial.units = trial.stored or 0
                self.say(worker, wire.Released(epoch=epoch, reason="memory", outgrown=True))
            return
        worker.uses = trial.need
        trial.units += 1
        self.say(worker, wire.Beat(epoch=epoch, batches=1, memory_bytes=trial.need))
        report = wire.Report(epoch=epoch, unit=trial.units, step=trial.units, value=1 / trial.units)
        self.say(worker, report)
        if trial.units == UNITS:
            worker.doing = "leaves"
            self.say(worker, wire.Ended(epoch=epoch, state="done"))
        elif worker.asked is not None:
            self.put(worker, worker.asked, wild=True)

    def put(self, worker: Worker, tier: TierName, *, wild: bool) -> None:
        """Go to a tier, or, now and then, somewhere else."""
        assert worker.number is not None
        trial = self.trials[worker.number]
        if wild and self.random.random() < 0.1:
            tier = self.random.choice([tier, "resident", "disk"])
        if (tier == "host" and not trial.moves) or (tier == "disk" and not trial.stores):
            tier = "host" if worker.doing == "parked" and worker.tier == "host" else "resident"
        if tier == "resident" and worker.uses < trial.need and not self.fit(worker, trial.need):
            tier = "host"
        worker.doing, worker.tier, worker.asked = "parked", tier, None
        held = {"resident": trial.need, "host": 0, "disk": trial.need}[tier]
        worker.uses = held  # a process has its memory until it is gone
        checkpoint = None
        if tier == "disk":
            worker.doing, checkpoint = "leaves", trial.checkpoint()
        parked = wire.Parked(
            epoch=worker.epoch,
            tier=tier,
            suspend_seconds=0.1,
            checkpoint=checkpoint,
            held_bytes=held if tier != "disk" else 0,
            host_bytes=trial.need if tier == "host" else 0,
            stores=trial.stores,
            moves=trial.moves,
        )
        self.say(worker, parked)

    # -- the rules

    def check(self, begun: int) -> None:
        self.broker.check()
        training = [w.device for w in self.workers.values() if w.doing == "trains"]
        assert len(training) == len(set(training)), "no device twice"
        for command in self.broker.log[begun:]:
            if isinstance(command, Send) and isinstance(command.message, wire.Grant):
                self.check_grant(command.message)

    def check_grant(self, grant: wire.Grant) -> None:
        """No grant while the device cannot hold it, unless nothing is left to evict."""
        book = self.broker.state.book
        slot = book.slots[grant.devices[0]]
        if slot.lease is None or slot.lease.epoch != grant.epoch:
            return  # it is over already
        run = book.run_of(slot.lease)
        fits = residency.fits(slot.device.memory_free_bytes, self.needed(slot, run))
        if fits is False:
            resident = [other for other in book.parked_on(slot) if other.tier == "resident"]
            left = [other for other in resident if other.asked or self.could_go(other)]
            assert not left, "somebody could have made room"
        if run is not None and run.alone:
            assert not any(other.stores for other in book.parked_on(slot)), "alone is alone"

    def needed(self, slot: Slot, run: Run | None) -> int | None:
        assert slot.lease is not None
        need = self.broker.state.book.studies["s"].need_of(run)
        held = sum(w.uses for w in self.workers.values() if run and w.number == run.number)
        return None if need is None else need - held

    def could_go(self, run: Run) -> bool:
        book = self.broker.state.book
        room = book.host_budget_bytes - book.host_used_bytes
        takes = run.takes_bytes
        moves = run.moves and takes is not None and takes <= room
        return run.stores or moves


@settings(deadline=None)
@given(
    random=st.randoms(use_true_random=False),
    policy=st.sampled_from(sorted(POLICIES)),
    gpus=st.integers(1, 2),
    told=st.sampled_from(["all", "all", "total", "nothing"]),
    wild_steps=st.integers(0, 40),
)
def test_every_trial_gets_its_device(
    random: Random, policy: str, gpus: int, told: str, wild_steps: int
) -> None:
    """Late, silent, dying and contrary clients break no rule; once they behave all is trained."""
    play = Play(random, policy=policy, gpus=gpus, told=told)
    for _ in range(wild_steps):
        play.step(wild=True)
    play.calm_down()
    for _ in range(400):
        if play.broker.state.status(play.broker.now)["studies"][0]["finished"]:
            break
        play.step(wild=False)
    study = play.broker.state.status(play.broker.now)["studies"][0]
    assert study["problem"] is None
    assert study["counts"]["done"] + study["counts"]["failed"] >= N_TRIALS
    assert study["finished"]
