"""The simulated accelerator behaves as CUDA does where programs go wrong."""

from __future__ import annotations

import copy
import ctypes
import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from support.accelerator import KIND, pinned_bytes, set_limit, waiting

pytestmark = pytest.mark.accelerator

MIB = 1 << 20
FIRST, SECOND = f"{KIND}:0", f"{KIND}:1"


@pytest.fixture
def small() -> Iterator[None]:
    """A first device that has room for 8 MiB beside its context."""
    torch.accelerator.synchronize(FIRST)
    torch.accelerator.empty_cache()
    set_limit(0, torch.accelerator.memory_reserved(FIRST) + 24 * MIB)
    yield
    set_limit(0, 256 * MIB)


def forked(work: Callable[[], object]) -> int:
    """The status of a fork of this process after it has done some work."""
    pid = os.fork()
    if pid == 0:
        work()
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def test_two_devices_are_there() -> None:
    """PyTorch knows them by the functions that are the same for all accelerators."""
    assert torch.accelerator.current_accelerator() == torch.device(KIND)
    assert torch.accelerator.device_count() == 2
    assert torch.zeros(1, device=SECOND).device == torch.device(SECOND)
    with pytest.raises(RuntimeError, match="same device"):
        torch.zeros(1, device=FIRST).add_(torch.zeros(1, device=SECOND))


def test_work_is_queued_until_something_waits_for_it() -> None:
    """A training step on the device ends before its kernels have run."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).to(FIRST)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    x = torch.ones(2, 4, device=FIRST)
    torch.accelerator.synchronize(FIRST)
    (net(x) ** 2).sum().backward()
    optimizer.step()
    assert waiting() > 5
    net[0].weight.sum().item()
    assert waiting() == 0


def test_copies_to_pinned_memory_come_late() -> None:
    """The host's side keeps what was there before until the copy has been waited for."""
    there, here = torch.ones(3, device=FIRST), torch.zeros(3).pin_memory()
    here.copy_(there, non_blocking=True)
    assert here.tolist() == [0, 0, 0]
    torch.accelerator.synchronize(FIRST)
    assert here.tolist() == [1, 1, 1]
    pageable = torch.zeros(3)
    pageable.copy_(there, non_blocking=True)
    assert pageable.tolist() == [1, 1, 1]


def test_streams_wait_for_each_other_by_events_only() -> None:
    """A stream that has not waited for another one reads what was there before."""
    tensor = torch.zeros(3, device=FIRST)
    torch.accelerator.synchronize(FIRST)
    side, main = torch.Stream(FIRST), torch.accelerator.current_stream(FIRST)
    tensor.fill_(1)
    with side:
        early = tensor.tolist()
        side.wait_stream(main)
        late = tensor.tolist()
    assert (early, late) == ([0, 0, 0], [1, 1, 1])


def test_the_cpu_must_not_touch_device_memory() -> None:
    """The kernel refuses to read it for this process, which would end by SIGSEGV if it did so."""
    libc, (_, end) = ctypes.CDLL(None, use_errno=True), os.pipe()
    here, there = torch.ones(3), torch.ones(3, device=SECOND)
    assert libc.write(end, ctypes.c_void_p(here.data_ptr()), 4) == 4
    assert libc.write(end, ctypes.c_void_p(there.data_ptr()), 4) == -1
    assert ctypes.get_errno() == errno.EFAULT


def test_a_context_does_not_survive_a_fork() -> None:
    """A fork of a process that has used a device is told so as by CUDA."""
    torch.ones(1, device=FIRST)

    def use() -> None:
        with pytest.raises(RuntimeError, match="Cannot re-initialize"):
            torch.ones(1, device=FIRST)
        assert torch.get_device_module(KIND)._is_in_bad_fork()

    assert forked(use) == 0


@pytest.mark.usefixtures("small")
def test_memory_is_limited_and_cached() -> None:
    """Freed memory stays reserved until the cache is emptied; what does not fit is an error."""
    before = torch.accelerator.memory_reserved(FIRST)
    block = torch.empty(6 * MIB, dtype=torch.uint8, device=FIRST)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        torch.empty(6 * MIB, dtype=torch.uint8, device=FIRST)
    del block
    assert torch.accelerator.memory_reserved(FIRST) == before + 6 * MIB
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved(FIRST) == before


def test_a_context_takes_memory() -> None:
    """It is no part of what the allocator has reserved."""
    torch.ones(1, device=SECOND)
    free, total = torch.accelerator.get_memory_info(SECOND)
    assert total - free - torch.accelerator.memory_reserved(SECOND) == 16 * MIB


def test_a_context_must_fit() -> None:
    """It raises what the driver raises, which is not the allocator's error."""
    script = (
        "import torch\n"
        "from support.accelerator import install, set_limit\n"
        f"install(); set_limit(0, {MIB}); torch.zeros(1, device={FIRST!r})\n"
    )
    tests = str(Path(__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": tests}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, text=True, capture_output=True, check=False
    )
    assert "\nRuntimeError: CUDA error: out of memory" in done.stderr


def test_pinned_memory_is_cached() -> None:
    """It is given back on request only."""
    torch.accelerator.empty_host_cache()
    before = pinned_bytes()
    torch.empty(3 * MIB, dtype=torch.uint8, pin_memory=True)
    assert pinned_bytes() == before + 4 * MIB
    torch.accelerator.empty_host_cache()
    assert pinned_bytes() == before


def test_random_numbers_come_from_generators_of_the_device() -> None:
    """Their states are set and kept apart from that of the CPU."""
    module = torch.get_device_module(KIND)
    torch.manual_seed(3)
    state, cpu = module.get_rng_state(FIRST), torch.get_rng_state()
    first = torch.nn.functional.dropout(torch.ones(64, device=FIRST)).tolist()
    assert torch.nn.functional.dropout(torch.ones(64, device=FIRST)).tolist() != first
    module.set_rng_state(state, FIRST)
    assert torch.nn.functional.dropout(torch.ones(64, device=FIRST)).tolist() == first
    assert torch.equal(torch.get_rng_state(), cpu)


@pytest.mark.parametrize(
    "net",
    [
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.MaxPool2d(2)),
        nn.GRU(6, 4, 2),
    ],
    ids=["convolution", "recurrent"],
)
def test_networks_compute_what_they_compute_on_a_cpu(net: nn.Module) -> None:
    """Outputs, gradients and the statistics of batch norm are the same up to rounding."""
    here = net.double()
    there = copy.deepcopy(here).to(FIRST)
    shape = (3, 1, 6, 6) if isinstance(net, nn.Sequential) else (3, 2, 6)
    x = torch.randn(shape, dtype=torch.double)
    for each, data in ((here, x), (there, x.to(FIRST))):
        out = each(data)
        ((out[0] if isinstance(out, tuple) else out) ** 2).sum().backward()
    for ours, theirs in zip(here.parameters(), there.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(theirs.grad.cpu(), ours.grad)
    for ours, theirs in zip(here.buffers(), there.buffers(), strict=True):
        torch.testing.assert_close(theirs.cpu(), ours)
