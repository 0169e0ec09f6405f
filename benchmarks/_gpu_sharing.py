"""Several processes on one device, or one on each: throughput of two trials, and ranks that stop.

As a script, this file is a process that trains whenever its input says for how long, and answers
how many steps that were.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from _gpu_device import Add, Setting, open_device

WIDTHS = (256, 2048, 8192)
"""Of the layers: the smallest leaves most of a GPU idle."""
RANKS = 2


# -- two trials --------------------------------------------------------------------------------


def beside_each_other(setting: Setting, add: Add) -> None:
    """Add the steps a second of one process, of two in turns, and of two at the same time."""
    seconds, turn = (0.3, 0.1) if setting.dry else (4.0, 0.5)
    for width in (16,) if setting.dry else WIDTHS:
        with _Trainers(setting, width, 2) as trainers:
            alone = trainers.steps(0, seconds) / seconds
            began, steps = time.monotonic(), 0
            while (took := time.monotonic() - began) < seconds:
                steps += sum(trainers.steps(number, turn) for number in range(2))
            turns = steps / took
            beside = trainers.all_steps(seconds) / seconds
        add(
            width=width,
            alone=alone,
            two_in_turns=turns,
            two_at_the_same_time=beside,
            gain_by_sharing=beside / turns,
        )


class _Trainers:
    """Processes that train, each on the same device."""

    def __init__(self, setting: Setting, width: int, count: int) -> None:
        options = [str(setting.folder), str(width), *["--dry-run"] * setting.dry]
        pipe = subprocess.PIPE
        self._children = [
            subprocess.Popen(
                [sys.executable, __file__, *options], stdin=pipe, stdout=pipe, text=True
            )
            for _ in range(count)
        ]

    def __enter__(self) -> _Trainers:
        for number in range(len(self._children)):
            self.steps(number, 0.1)  # warms up
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            child.communicate()

    def steps(self, number: int, seconds: float) -> int:
        self._begin(number, seconds)
        return self._end(number)

    def all_steps(self, seconds: float) -> int:
        for number in range(len(self._children)):
            self._begin(number, seconds)
        return sum(self._end(number) for number in range(len(self._children)))

    def _begin(self, number: int, seconds: float) -> None:
        stdin = self._children[number].stdin
        assert stdin is not None
        print(seconds, file=stdin, flush=True)

    def _end(self, number: int) -> int:
        stdout = self._children[number].stdout
        assert stdout is not None
        return int(stdout.readline())


def be_trainer(folder: Path, width: int, *, dry: bool) -> None:
    setting = open_device(folder, dry=dry)
    import torch
    from torch import nn

    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(4)]
    net = nn.Sequential(*layers).to(setting.device)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    data = torch.ones(64, width, device=setting.device)
    for line in sys.stdin:
        ends, steps = time.monotonic() + float(line), 0
        while time.monotonic() < ends or not steps:
            optimizer.zero_grad()
            net(data).square().mean().backward()
            optimizer.step()
            steps += 1
            if steps % 8 == 0:  # else the queue would go on after the turn
                torch.accelerator.synchronize()
        torch.accelerator.synchronize()
        print(steps, flush=True)


# -- ranks -------------------------------------------------------------------------------------


def stop_ranks(setting: Setting, add: Add) -> None:
    """Add if ranks have stopped at the same batch, each time, and ended as without a stop."""
    import torch

    count = torch.accelerator.device_count()
    several = setting.kind == "cuda" and count >= RANKS
    backend = "nccl" if several else "gloo"
    batches, stops = (40, 3) if setting.dry else (400, 20)
    run = _RankRun(setting, backend, batches)
    whole, _, _ = run(0)
    stopped, seen, seconds = run(stops)
    add(
        backend=backend,
        ranks=RANKS,
        devices=count,
        stops=len(seen),
        at_the_same_batch=all(len(set(points)) == 1 for points in seen),
        exact=whole == stopped and len(set(whole)) == 1,
        ms_from_asking_to_the_stop=1e3 * sum(seconds) / max(1, len(seconds)),
        slowest_ms=1e3 * max(seconds, default=0.0),
    )


class _RankRun:
    """A training in two processes whose gradients are only queued to be summed."""

    LAG = 4

    def __init__(self, setting: Setting, backend: str, batches: int) -> None:
        self._setting = setting
        self._backend = backend
        self._batches = batches

    def __call__(self, stops: int) -> tuple[list[str], list[list[int]], list[float]]:
        """Train once; the end of each rank, where they stopped, and how long that took."""
        import torch.multiprocessing

        from optuna_hermes.suspend._ranks._parent import Ranks

        # Spawned: CUDA does not work in forks of a process that has used it.
        context = torch.multiprocessing.get_context("spawn")
        session = _asking(stops)
        ranks = Ranks(
            RANKS,
            context,
            trial="trial 0",
            session=session,
            all_started=lambda: None,
            report=lambda unit, value: False,
            save=None,
            merge=lambda trees: {"all": trees},
        )
        meet = self._setting.folder / f"meet-{stops}"
        ends = [context.Pipe(duplex=False) for _ in range(RANKS)]
        children = [
            context.Process(
                target=_be_rank,
                args=(
                    *(self._setting, self._backend, self._batches, meet),
                    *(ranks.channels, number, ends[number][1]),
                ),
            )
            for number in range(RANKS)
        ]
        for child in children:
            child.start()
        results = [end.recv() for end, _ in ends]
        for child in children:
            child.join()
        ranks.close()
        return results, session.points, session.seconds


def _asking(times: int) -> Any:
    """A session that wants the device back, again as soon as all have stopped."""
    from optuna_hermes.testing import FakeSession

    class Asking(FakeSession):
        def __init__(self) -> None:
            super().__init__()
            self.points: list[list[int]] = []
            self.seconds: list[float] = []
            self.must_yield = False
            self._since = 0.0

        def training(self, *, can_store: bool) -> None:
            self._ask()

        def _ask(self) -> None:
            self.must_yield, self._since = len(self.points) < times, time.monotonic()

        def park(self, state: Any) -> None:
            self.seconds.append(time.monotonic() - self._since)
            self.points.append([tree["point"] for tree in state.dump()["all"]])
            self._ask()

    return Asking()


def _be_rank(
    setting: Setting,
    backend: str,
    batches: int,
    meet: Path,
    channels: Any,
    number: int,
    end: Any,
) -> None:
    import random

    import torch
    import torch.distributed as dist

    rank = channels.become_rank(number)
    # Gloo knows no simulated devices; two ranks of it share one GPU.
    device = "cpu"
    if setting.kind == "cuda":
        device = f"cuda:{number if backend == 'nccl' else 0}"
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{meet}", rank=number, world_size=RANKS)
    weight, queued = torch.zeros(4096, device=device), deque[Any]()
    delays = random.Random(number)
    place = _Between()
    rank.training(can_store=False)
    for batch in range(1, 1 + batches):
        place.point = batch
        rank.pass_point()
        if rank.must_yield:
            rank.park(place)
        time.sleep(delays.choice([0.0, 0.0, 0.002, 0.01]))  # ranks are never as fast as each other
        noise = torch.Generator().manual_seed(1000 * number + batch)
        gradient = torch.randn(4096, generator=noise).to(device) + weight
        queued.append((dist.all_reduce(gradient, async_op=True), gradient))
        while len(queued) > (0 if batch == batches else _RankRun.LAG):
            work, gradient = queued.popleft()
            work.wait()
            weight -= 0.01 * gradient
    end.send(weight.cpu().numpy().tobytes().hex())
    rank.ended({}, whole=True)
    dist.destroy_process_group()


class _Between:
    """A rank between two batches (``suspend.CleanPoint``)."""

    name = "trial 0"
    units = 0
    can_store = can_offload = True

    def __init__(self) -> None:
        self.point = 0

    def ended(self) -> bool:
        return False

    def roots(self) -> list[object]:
        return []

    def saved(self) -> None:
        """See ``CleanPoint``: nothing is saved beforehand."""

    def dump(self) -> dict[str, Any]:
        return {"point": self.point}


if __name__ == "__main__":
    be_trainer(Path(sys.argv[1]), int(sys.argv[2]), dry="--dry-run" in sys.argv)
