"""The state of a trial is found, moved to host memory, and restored unchanged."""

from __future__ import annotations

import contextlib
import functools
import logging
import resource
import threading
import types
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import optuna
import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from optuna_hermes.errors import SuspendError
from optuna_hermes.suspend import rng_state, set_rng_state
from optuna_hermes.suspend._state import seed_everything
from optuna_hermes.suspend._tiers import _host as host_module
from optuna_hermes.suspend._tiers._arena import Arena
from optuna_hermes.suspend._tiers._host import HostTier
from optuna_hermes.suspend._tiers._tensor_storages import (
    Gauge,
    device_of,
    held_bytes,
    movable,
    peak_bytes,
    storages,
)
from optuna_hermes.suspend._tiers._tier_mover import TierMover

CPU = torch.device("cpu")
MIB = 1 << 20


class Point:
    """A trial that consists of what it is given (``suspend.CleanPoint``)."""

    name = "trial 7"
    units = 1
    can_offload = True

    def __init__(self, *roots: object, can_store: bool = False) -> None:
        self.can_store = can_store
        self._roots = roots

    def ended(self) -> bool:
        return False

    def roots(self) -> tuple[object, ...]:
        return self._roots

    def waits(self) -> None:
        """See ``CleanPoint``."""

    def saved(self) -> None:
        """See ``CleanPoint``."""

    def dump(self) -> dict[str, Any]:
        return {"roots": list(self._roots)}


class Holder:
    def __init__(self, **fields: object) -> None:
        vars(self).update(fields)


class Slotted:
    __slots__ = ("__private", "unset")

    def __init__(self, value: object) -> None:
        self.__private = value


class Hostile:
    """Answers no question."""

    def __init__(self, value: object) -> None:
        object.__setattr__(self, "value", value)

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"You must not ask for {name}.")

    def __iter__(self) -> Iterator[Any]:
        raise RuntimeError("You must not iterate.")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("You must not compare.")

    def __hash__(self) -> int:
        raise RuntimeError("You must not hash.")


def ones() -> torch.Tensor:
    return torch.ones(3)


def empty(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() == 0


def found(*roots: object) -> list[int]:
    return sorted(storage.data_ptr() for storage in storages(roots, CPU))


def at(*tensors: torch.Tensor) -> list[int]:
    return sorted(tensor.untyped_storage().data_ptr() for tensor in tensors)


@contextlib.contextmanager
def short_of_memory(room: int) -> Iterator[None]:
    """The process gets ``room`` more bytes, and no more.

    What is allocated meanwhile must be above 32 MiB: smaller pieces may come from freed memory.
    """
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = psutil.Process().memory_info().vms + room
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Log of the calls to a GPU, where there is none: its tensors are the CPU's."""
    told: list[str] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            pass

        def synchronize(self) -> None:
            told.append("stream waited")

    @contextlib.contextmanager
    def stream(of: Stream) -> Iterator[None]:
        told.append("stream on")
        yield
        told.append("stream off")

    def tell(word: str, result: Any = None) -> Any:
        return lambda *args: (told.append(word), result)[1]

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "synchronize", tell("idle"))
    monkeypatch.setattr(torch.cuda, "empty_cache", tell("cache emptied"))
    monkeypatch.setattr(torch.cuda, "memory_reserved", tell("reserved", 2 * MIB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 700)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"allocation.all.current": 2})
    monkeypatch.setattr(
        torch.accelerator, "empty_host_cache", tell("host cache emptied"), raising=False
    )
    monkeypatch.setattr(
        torch._C, "_cuda_clearCublasWorkspaces", tell("workspaces cleared"), raising=False
    )
    return told


# -- what belongs to a trial -----------------------------------------------------------------------


def test_a_network_and_its_optimizer_are_found() -> None:
    """Parameters, tied ones once, buffers, gradients, and all that the optimizer keeps."""
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    net[2].weight = net[0].weight
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    parameters = list(net.parameters())
    slots = [value for slot in optimizer.state.values() for value in slot.values()]
    assert len(parameters) == 5
    assert len(slots) == 15
    gradients = [p.grad for p in parameters if p.grad is not None]
    expected = at(*parameters, *gradients, *net.buffers(), *slots)
    assert found(net, optimizer) == found(optimizer, net, net) == expected
    assert (
        held_bytes([net, optimizer], CPU)
        == peak_bytes([net, optimizer], CPU)
        == sum(storage.nbytes() for storage in storages([net, optimizer], CPU))
    )


def test_a_gauge_remembers_the_most_it_has_seen() -> None:
    """On a CPU it looks at the first, second, fourth and eighth time, and never goes down."""
    gauge, held = Gauge(), [torch.zeros(MIB, dtype=torch.uint8)]
    assert gauge.read([held]) == MIB
    held.append(torch.zeros(MIB, dtype=torch.uint8))
    assert [gauge.read([held]) for _ in range(2)] == [2 * MIB] * 2
    held.append(torch.zeros(MIB, dtype=torch.uint8))
    assert gauge.read([held]) == 3 * MIB
    held.clear()
    assert [gauge.read([held]) for _ in range(4)] == [3 * MIB] * 4


@pytest.mark.parametrize(
    "around",
    [
        lambda x: [x],
        lambda x: (1, (x,)),
        lambda x: {"a": {2: x}},
        lambda x: {x: None},
        lambda x: frozenset({x}),
        lambda x: deque([x]),
        lambda x: Holder(a=Holder(b=x)),
        Slotted,
        Hostile,
        lambda x: functools.partial(print, x),
        lambda x: types.SimpleNamespace(x=x),
        lambda x: x[1:],
        lambda x: nn.ParameterList([nn.Parameter(x)]),
    ],
)
def test_containers_and_objects_are_entered(around: Any) -> None:
    """A tensor is found wherever it is, and no object is asked anything."""
    tensor = ones()
    assert found(around(tensor)) == at(tensor)


def test_what_leads_out_of_a_trial_is_not_entered() -> None:
    """Code, threads, data, Lightning's trainer, Optuna's trial, and what is only watched."""
    tensor = ones()
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.kept = tensor
    trial = optuna.create_study().ask()
    trial.kept = tensor
    module = types.ModuleType("module")
    module.kept = tensor
    host = HostTier()
    host.kept = tensor
    data = TensorDataset(tensor)
    outside = [
        type("Class", (), {"kept": tensor}),
        lambda: tensor,
        [tensor].append,
        Holder(x=tensor).__init__,
        module,
        threading.Thread(args=(tensor,)),
        data,
        DataLoader(data),
        (each for each in [tensor]),
        trainer,
        trial,
        host,
        weakref.ref(tensor),
        weakref.WeakSet([tensor]),
    ]
    for each in outside:
        assert found(Holder(x=each)) == [], each


def test_circles_end() -> None:
    """Objects that hold each other are walked once."""
    first, second = Holder(x=ones()), Holder(x=ones())
    first.other, second.other = second, first
    assert len(found(first)) == 2


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_tensors_without_memory_of_their_own() -> None:
    """The parts of a sparse tensor are found; one without memory is no part of a trial."""
    sparse = torch.ones(2, 2).to_sparse()
    jagged = torch.nested.nested_tensor([ones()], layout=torch.jagged)
    assert found(sparse) == at(sparse._indices(), sparse._values())
    rows = torch.ones(2, 2).to_sparse_csr()
    assert found(rows) == at(rows.crow_indices(), rows.col_indices(), rows.values())
    assert set(at(jagged.values())) <= set(found(jagged))
    assert found(torch.ones(3, device="meta"), torch.empty(0)) == []


def test_a_cpu_trial_is_on_the_cpu() -> None:
    """Without a CUDA tensor the device is the CPU."""
    assert device_of([ones()]) == device_of([]) == CPU


# -- memory in blocks ----------------------------------------------------------------------------


def bytes_of(count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)


def test_bytes_come_back_over_the_edges_of_blocks() -> None:
    """Storages that lie in one block, in two and in four are all as they were."""
    tensors = [bytes_of(count, seed=count) for count in (5, MIB, 3, 3 * MIB + 1, 700)]
    before = [tensor.clone() for tensor in tensors]
    arena = Arena(CPU, block_bytes=MIB)
    parts = [tensor.untyped_storage() for tensor in tensors]
    for _ in range(2):
        arena.keep(parts)
        assert all(arena.view(i).equal(tensor) for i, tensor in enumerate(before))
        for tensor in tensors:
            tensor.zero_()
        arena.put_back(parts)
        assert all(map(torch.equal, tensors, before))
    assert arena.size_bytes == 5 * MIB


def test_a_view_is_no_copy_where_it_need_not_be() -> None:
    """The bytes of a storage in one block are shown as they lie there, and no others."""
    arena = Arena(CPU, block_bytes=MIB)
    small, large = bytes_of(100, seed=1), bytes_of(2 * MIB, seed=2)
    arena.keep([small.untyped_storage(), large.untyped_storage()])
    assert arena.view(0).data_ptr() == arena.view(0).data_ptr()
    assert arena.view(1).data_ptr() != arena.view(1).data_ptr()
    assert arena.view(0).untyped_storage().nbytes() == 100
    assert arena.view(1).untyped_storage().nbytes() == 2 * MIB


def test_an_arena_takes_little_more_than_it_must() -> None:
    """Blocks are powers of two, the last is small, and none is taken twice."""
    arena = Arena(CPU, block_bytes=8 * MIB)
    sizes = []
    for count in (1, MIB, MIB + 1, 18 * MIB, 3, 26 * MIB):
        arena.keep([torch.empty(count, dtype=torch.uint8).untyped_storage()])
        sizes.append(arena.size_bytes // MIB)
    assert sizes == [1, 1, 2, 18, 18, 26]
    arena.free()
    assert arena.size_bytes == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="Its memory can be pinned.")
def test_memory_that_cannot_be_pinned_is_used_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Copies are slower then, which is said once."""
    caplog.set_level(logging.INFO)
    arena = Arena(torch.device("cuda"), block_bytes=MIB)
    arena._grow(2 * MIB)
    assert arena.size_bytes == 2 * MIB
    assert [record.message.partition(",")[0] for record in caplog.records] == [
        "Host memory cannot be pinned"
    ]


def test_a_gpu_is_waited_for_before_and_after(gpu: list[str]) -> None:
    """Copies begin when the device is idle, go to one stream, and are waited for together."""
    arena = Arena(torch.device("cuda"), block_bytes=MIB)
    tensors = [bytes_of(2 * MIB, seed=1), bytes_of(9, seed=2)]
    arena.keep([tensor.untyped_storage() for tensor in tensors])
    arena.put_back([tensor.untyped_storage() for tensor in tensors])
    arena.free()
    assert gpu == [*["idle", "stream on", "stream off", "stream waited"] * 2, "host cache emptied"]


# -- in host memory and back ---------------------------------------------------------------------


def test_memory_that_is_not_the_trials_own_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Memory that NumPy, files or other processes see is not moved, but counted and said, once."""
    caplog.set_level(logging.INFO)
    file = tmp_path / "numbers"
    file.write_bytes(bytes(12))
    shown = ones()
    array = shown.numpy()
    lent = [
        torch.from_numpy(np.ones(3, np.float32)),
        ones().share_memory_(),
        torch.from_file(str(file), size=3),
        shown,
    ]
    own = ones()
    assert [movable(tensor.untyped_storage()) for tensor in [*lent, own]] == [False] * 4 + [True]
    host = HostTier()
    for _ in range(2):
        assert host.suspend(Point(lent, own)).device_bytes == 48
        assert (array.sum(), lent[1].sum(), empty(own)) == (3, 3, True)
        host.resume()
    assert own.tolist() == [1, 1, 1]
    messages = [record.message for record in caplog.records]
    assert messages == ["Trial 7 leaves 48 bytes in 4 blocks on cpu."]


def test_history_and_inference_survive() -> None:
    """A graph that is open trains on, and a tensor of inference mode stays one."""
    weight = nn.Parameter(torch.tensor([2.0, 3.0]))
    square = weight * weight
    with torch.inference_mode():
        seen = torch.tensor([5.0])
    host = HostTier()
    host.suspend(Point(weight, square, seen))
    assert empty(weight)
    assert empty(square)
    assert empty(seen)
    host.resume()
    square.sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [4.0, 6.0]
    assert seen.is_inference()
    assert seen.tolist() == [5.0]


def test_a_tier_that_its_trial_leads_to_is_no_part_of_it() -> None:
    """State that is kept is not kept again with the next suspension."""
    run = Holder(x=ones(), host=HostTier())
    for _ in range(3):
        held = run.host.suspend(Point(run))
        run.host.resume()
    assert (held.device_bytes, held.host_bytes) == (0, MIB)


def test_host_memory_is_kept_for_a_trial_that_trains_next() -> None:
    """It is given back once the trial waits on its device, where it needs none."""
    run, mover = Point(ones()), TierMover(None, lambda: ())
    mover.put(run, "host")
    assert mover.put(run, "resident").host_bytes == MIB
    mover.back()
    assert mover.put(run, "host").host_bytes == MIB
    mover.back()
    assert mover.put(run, "resident").host_bytes == 0


def test_nobody_elses_random_numbers_change() -> None:
    """No generator moves."""
    before = repr(rng_state())
    host = HostTier()
    host.suspend(Point(ones(), can_store=True))
    host.tree()
    host.resume()
    assert repr(rng_state()) == before


@pytest.mark.parametrize("bits", [np.random.PCG64, np.random.Philox, np.random.SFC64])
def test_numpy_may_draw_from_another_bit_generator(bits: Any) -> None:
    """One of ``np.random.set_bit_generator`` comes back, also where a process has the first."""
    first = np.random.mtrand.get_bit_generator()
    try:
        np.random.mtrand.set_bit_generator(bits(3))
        np.random.randn(3)
        state = rng_state()
        drawn = np.random.randn(5).tolist()
        seed_everything(1)
        assert np.random.rand() == np.random.RandomState(1).rand()
        set_rng_state(state)
        assert np.random.randn(5).tolist() == drawn
    finally:
        np.random.mtrand.set_bit_generator(first)


def test_a_copy_that_breaks_off_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is emptied before everything is safe, and the next attempt works."""
    tensors = [ones() for _ in range(3)]
    host = HostTier()

    def pairs(self: Arena, parts: Any) -> Iterator[Any]:
        yield from list(whole(self, parts))[:2]
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    whole = Arena._pairs
    with monkeypatch.context() as patch:
        patch.setattr(Arena, "_pairs", pairs)
        with pytest.raises(SuspendError, match=r"Trial 7 must have 36 bytes.*illegal"):
            host.suspend(Point(tensors))
    assert [tensor.tolist() for tensor in tensors] == [[1, 1, 1]] * 3
    host.suspend(Point(tensors))
    assert all(map(empty, tensors))
    host.resume()
    assert [tensor.tolist() for tensor in tensors] == [[1, 1, 1]] * 3


def test_without_host_memory_a_trial_stays() -> None:
    """If the host has no room nothing changes, and nothing is kept of the attempt."""
    tensors = [torch.arange(8 * MIB), torch.arange(8 * MIB, 16 * MIB)]
    before = [tensor.clone() for tensor in tensors]
    host = HostTier()
    with short_of_memory(80 * MIB), pytest.raises(SuspendError, match="allocate memory"):
        host.suspend(Point(tensors))
    assert all(map(torch.equal, tensors, before))
    assert host._arena.size_bytes == 0


def test_without_device_memory_a_trial_stays_in_the_host() -> None:
    """If the device has no room the trial takes none of it, and comes back when there is some."""
    tensors = [torch.arange(8 * MIB), torch.arange(8 * MIB, 16 * MIB)]
    before = [tensor.clone() for tensor in tensors]
    host = HostTier()
    host.suspend(Point(tensors))
    with (
        short_of_memory(80 * MIB),
        pytest.raises(SuspendError, match="Trial 7 must have 134217728"),
    ):
        host.resume()
    assert all(map(empty, tensors))
    host.resume()
    assert all(map(torch.equal, tensors, before))


def test_a_tree_is_in_host_memory() -> None:
    """Shapes, strides, what is there twice and what shares memory are as in the dump."""
    base = torch.arange(6.0).reshape(2, 3)
    turned = base.t()[1:]
    negative = torch.tensor([1 + 2j]).conj()
    lent = torch.from_numpy(np.ones(2))
    named = OrderedDict(base=base)
    named.version = 3
    point = Point(
        base, turned, base, named, {"a": (Counter("aab"), lent, negative)}, can_store=True
    )
    host = HostTier()
    host.suspend(point)
    assert empty(base)
    first, second, third, mapping, plain = host.tree()["roots"]
    assert first is third is mapping["base"]
    assert (type(mapping), mapping.version) == (OrderedDict, 3)
    assert first.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert second.tolist() == [[1, 4], [2, 5]]
    assert second.stride() == turned.stride()
    first[0, 1] = 7
    assert second[0, 0] == 7
    assert plain["a"][0] == {"a": 2, "b": 1}
    assert plain["a"][1] is lent
    assert plain["a"][2].tolist() == [1 - 2j]
    assert empty(base)
    assert named["base"] is base


def test_only_what_could_be_stored_has_a_tree() -> None:
    """Before it comes, after it went, or without a whole state there is none."""
    host = HostTier()
    with pytest.raises(SuspendError, match="no trial does not"):
        host.tree()
    host.suspend(Point(ones()))
    with pytest.raises(SuspendError, match="trial 7 does not"):
        host.tree()
    host.resume()
    host.suspend(Point(ones(), can_store=True))
    host.resume()
    with pytest.raises(SuspendError):
        host.tree()


def test_an_abandoned_trial_can_be_touched() -> None:
    """Tensors read while the process unwinds have no elements, and all memory is back."""
    net = nn.Linear(2, 2)
    net(torch.ones(1, 2)).sum().backward()
    other = ones()
    host = HostTier()
    host.suspend(Point(net))
    host.abandon()
    assert [p.tolist() for p in net.parameters()] == [[], []]
    assert net.weight.grad is not None
    assert net.weight.grad.sum() == 0
    assert other.tolist() == [1, 1, 1]
    assert host._arena.size_bytes == 0


def test_a_gpu_is_asked_what_it_still_holds(
    gpu: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a GPU the allocator says what stayed behind, once its cache is empty."""
    caplog.set_level(logging.INFO)
    tensor = ones()
    monkeypatch.setattr(host_module, "device_of", lambda roots: torch.device("cuda", 0))
    monkeypatch.setattr(host_module, "storages", lambda *args: [tensor.untyped_storage()])
    host = HostTier()
    held = host.suspend(Point())
    assert held.device_bytes == 2 * MIB
    assert gpu[-3:] == ["workspaces cleared", "cache emptied", "reserved"]
    host.resume()
    assert tensor.tolist() == [1, 1, 1]
    assert caplog.records[-1].message == "Trial 7 leaves 700 bytes in 2 blocks on cuda:0."
