"""One trial of this process into each tier and back, beside a plain copy of as many bytes."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _switch_runs import Net, adamw, train_step, wait

from optuna_hermes.model import Checkpoint, TierName
from optuna_hermes.suspend import Footprint, read
from optuna_hermes.suspend._tiers._tier_mover import TierMover

_FOUND = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
DEVICE = "cpu" if _FOUND is None else _FOUND.type
RUN = "trial 0"


class Bottleneck(torch.nn.Module):
    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        outside = 4 * width
        self.body = torch.nn.Sequential(
            *_conv(inside, width, 1),
            torch.nn.ReLU(),
            *_conv(width, width, 3, stride),
            torch.nn.ReLU(),
            *_conv(width, outside, 1),
        )
        same = inside == outside and stride == 1
        self.way_round = torch.nn.Sequential(*([] if same else _conv(inside, outside, 1, stride)))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(inputs) + self.way_round(inputs))


class ResNet50(torch.nn.Module):
    """25.6 million parameters in 161 tensors: 0.31 GB with AdamW."""

    def __init__(self) -> None:
        super().__init__()
        blocks, inside = [], 64
        for stage, depth in enumerate((3, 4, 6, 3)):
            for block in range(depth):
                stride = 2 if stage and not block else 1
                blocks.append(Bottleneck(inside, 64 << stage, stride))
                inside = 256 << stage
        stem = *_conv(3, 64, 7, 2), torch.nn.ReLU(), torch.nn.MaxPool2d(3, 2, 1)
        head = torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(2048, 1000)
        self.net = torch.nn.Sequential(*stem, *blocks, *head)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(inputs.expand(2, 3, 64, 64))  # type: ignore[no-any-return]


def _conv(inside: int, outside: int, kernel: int, stride: int = 1) -> Iterator[torch.nn.Module]:
    yield torch.nn.Conv2d(inside, outside, kernel, stride, kernel // 2, bias=False)
    yield torch.nn.BatchNorm2d(outside)


class Run:
    """A trial that stands between two batches (``suspend.CleanPoint``)."""

    name = RUN
    units = 0
    can_store = True
    can_offload = True

    def __init__(self, make: Callable[[], torch.nn.Module]) -> None:
        self.model = make().to(DEVICE)
        self.optimizer = adamw(self.model)
        self._inputs = torch.ones(1, 1, device=DEVICE)

    def train(self) -> None:
        train_step(self.model, self.optimizer, self._inputs)

    def ended(self) -> bool:
        return False

    def roots(self) -> Iterable[object]:
        return self.model, self.optimizer

    def saved(self) -> None:
        """See ``CleanPoint``: nothing is saved beforehand."""

    def dump(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, tree: dict[str, Any]) -> None:
        self.model.load_state_dict(tree["model"])
        self.optimizer.load_state_dict(tree["optimizer"])

    @property
    def state_bytes(self) -> int:
        kept = [v for state in self.optimizer.state.values() for v in state.values()]
        tensors = [*self.model.parameters(), *self.model.buffers(), *kept]
        return sum(tensor.nbytes for tensor in tensors)


def makers(sizes_mb: list[float]) -> dict[str, Callable[[], torch.nn.Module]]:
    """Return makers of the networks to measure, by name."""
    made: dict[str, Callable[[], torch.nn.Module]] = {
        f"{size:g} MB": partial(Net, int(1e6 * size)) for size in sizes_mb
    }
    return {**made, "ResNet-50": ResNet50} if max(sizes_mb) >= 300 else made


def measure_tier(
    make: Callable[[], torch.nn.Module], tier: TierName, folder: Path, repetitions: int
) -> dict[str, Any]:
    """Park and resume one trial in a tier; medians of seconds, of all but the first time."""
    torch.manual_seed(0)
    trial = Run(make)
    for _ in range(2):
        trial.train()
    step = statistics.median(_seconds(trial.train) for _ in range(5))
    parks, resumes, first_steps = [], [], []
    with tempfile.TemporaryDirectory(dir=folder) as checkpoints:
        stored: list[Checkpoint] = []
        parking = TierMover(Path(checkpoints), lambda: stored[-1:])
        for _ in range(1 + repetitions):
            wait()
            begin = time.perf_counter()
            held = parking.put(trial, tier)
            parks.append(time.perf_counter() - begin)
            if parking.tier != tier:
                raise SystemExit(f"Tier {tier} refused a trial of {trial.state_bytes} bytes.")
            stored += [held.stored] if held.stored else []
            resumes.append(_seconds(partial(_bring_back, parking, trial, held)))
            first_steps.append(_seconds(trial.train))
    moved = _moved(trial, held)
    return {
        "state_bytes": trial.state_bytes,
        "moved_bytes": moved,
        "first_park_seconds": parks[0],
        "park_seconds": statistics.median(parks[1:]),
        "resume_seconds": statistics.median(resumes[1:]),
        "first_step_seconds": statistics.median(first_steps[1:]),
        "step_seconds": step,
    }


def copy_bandwidth(size_bytes: int, repetitions: int) -> dict[str, float]:
    """Bytes a second of one plain copy, out of the device and back in; a GPU's host is pinned."""
    device = torch.zeros(size_bytes, dtype=torch.uint8, device=DEVICE)
    host = torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=DEVICE != "cpu")
    out = [_seconds(partial(host.copy_, device)) for _ in range(1 + repetitions)]
    into = [_seconds(partial(device.copy_, host)) for _ in range(1 + repetitions)]
    return {
        "out": size_bytes / statistics.median(out[1:]),
        "in": size_bytes / statistics.median(into[1:]),
    }


def _bring_back(parking: TierMover, trial: Run, held: Footprint) -> None:
    parking.back()
    if held.stored is not None:
        found = read([held.stored], RUN, Path(held.stored.path).parent)
        assert found is not None
        trial.load(found[1])


def _moved(trial: Run, held: Footprint) -> int:
    if held.stored:
        return held.stored.size_bytes
    if not held.host_bytes:
        return 0
    gradients = [p.grad for p in trial.model.parameters() if p.grad is not None]
    return trial.state_bytes + sum(gradient.nbytes for gradient in gradients)


def _seconds(call: Callable[[], object]) -> float:
    wait()
    begin = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - begin
