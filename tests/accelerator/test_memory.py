"""Nothing of a trial is lost where the memory of an accelerator does not suffice."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from optuna_hermes.errors import SuspendError
from optuna_hermes.suspend._tiers._host import HostTier
from optuna_hermes.suspend._tiers._tensor_storages import Gauge
from optuna_hermes.suspend._tiers._tier_mover import resident
from optuna_hermes.workers._fault import is_out_of_memory
from support.accelerator import KIND, pinned_bytes, set_limit, waiting

pytestmark = pytest.mark.accelerator

DEVICE = f"{KIND}:0"
MIB = 1 << 20


class Point:
    """A trial that consists of one network (``suspend.CleanPoint``)."""

    name = "trial 7"
    units = 1
    can_store = can_offload = True

    def __init__(self, net: nn.Module) -> None:
        self.net = net

    def ended(self) -> bool:
        return False

    def roots(self) -> list[object]:
        return [self.net]

    def waits(self) -> None:
        """See ``CleanPoint``."""

    def saved(self) -> None:
        """See ``CleanPoint``."""

    def dump(self) -> dict[str, Any]:
        return dict(self.net.state_dict())


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    """The device has room for 32 MiB beside its context and what earlier tests have left."""
    torch.zeros(1, device=DEVICE)
    gc.collect()  # trainings of earlier tests, which would be moved with these
    torch.accelerator.empty_cache()
    torch.accelerator.empty_host_cache()
    set_limit(0, torch.accelerator.memory_reserved(DEVICE) + (16 + 32) * MIB)
    yield
    set_limit(0, 256 * MIB)


def network() -> nn.Linear:
    """A network of 16 MiB."""
    return nn.Linear(2048, 2048, bias=False).to(DEVICE)


def taken() -> torch.Tensor:
    return torch.zeros(28 * MIB, dtype=torch.uint8, device=DEVICE)


def test_a_trial_waits_on_until_there_is_room() -> None:
    """Its device is full when it comes back: it is as it was, and comes back later."""
    net = network()
    before, identity = net.weight.detach().cpu(), net.weight.untyped_storage()._cdata
    host = HostTier()
    host.suspend(Point(net))
    others = taken()
    with pytest.raises(SuspendError, match="bring it back when there is room"):
        host.resume()
    assert torch.equal(host.tree()["weight"], before)
    del others
    host.resume()
    assert torch.equal(net.weight.detach().cpu(), before)
    assert net.weight.untyped_storage()._cdata == identity


def test_two_trials_that_do_not_fit_together_take_turns() -> None:
    """One trial gives back enough for the other, which the allocator's cache would prevent."""
    first, host = network(), HostTier()
    kept = first.weight.detach().cpu()
    held = torch.accelerator.memory_reserved(DEVICE)
    footprint = host.suspend(Point(first))
    assert footprint.device_bytes == torch.accelerator.memory_reserved(DEVICE) <= held - 16 * MIB
    second = taken()
    second.add_(1)
    del second
    torch.accelerator.empty_cache()
    host.resume()
    assert torch.equal(first.weight.detach().cpu(), kept)


def test_pinned_memory_is_given_back_with_the_trial() -> None:
    """It cannot be swapped: what a trial on disk had of it must be free for others."""
    before, host, net = pinned_bytes(), HostTier(), network()
    host.suspend(Point(net))
    assert pinned_bytes() == before + 16 * MIB
    host.abandon()
    assert pinned_bytes() == before
    assert net.weight.numel() == 0


def test_a_gauge_reads_the_most_that_was_reserved() -> None:
    """Also what was freed before it looked."""
    gauge, net = Gauge(), network()
    del net
    # The process leads to the device by what is still there.
    assert gauge.read([torch.zeros(1, device=DEVICE)]) >= 16 * MIB


def test_a_trial_on_the_second_device() -> None:
    """It is moved from there and back, though the process's current device is the first."""
    net = network().to(f"{KIND}:1")
    before = net.weight.detach().cpu()
    held = torch.accelerator.memory_reserved(1)
    host = HostTier()
    footprint = host.suspend(Point(net))
    assert footprint.device_bytes == torch.accelerator.memory_reserved(1) <= held - 16 * MIB
    taken()
    host.resume()
    assert net.weight.device == torch.device(KIND, 1)
    assert torch.equal(net.weight.detach().cpu(), before)


def test_a_trial_on_two_devices_leaves_both_idle() -> None:
    """All devices of a lease are handed on."""
    nets = nn.ModuleList([nn.Linear(4, 4).to(f"{KIND}:{index}") for index in range(2)])
    for net in nets:
        torch.nn.init.ones_(net.weight)
    assert [waiting(index) > 0 for index in range(2)] == [True, True]
    resident(Point(nets))
    assert [waiting(index) for index in range(2)] == [0, 0]


def test_an_error_of_the_device_is_known_to_be_for_want_of_memory() -> None:
    """The trial is put back for it, and is not failed."""
    with pytest.raises(torch.OutOfMemoryError) as error:
        torch.empty(64 * MIB, dtype=torch.uint8, device=DEVICE)
    assert is_out_of_memory(error.value)
