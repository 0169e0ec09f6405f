"""The contract of ``DeviceSource``, which every source passes on a host that tests can change."""

from __future__ import annotations

from abc import ABC, abstractmethod

import pytest

from optuna_hermes.broker._devices._source import DeviceSource
from optuna_hermes.broker._devices._visible import environment


class DeviceHost(ABC):
    """A host with two devices of one source.

    Args:
        limited: whether the memory of its devices is known.
        breakable: whether its devices can break.
    """

    limited = True
    breakable = True

    @abstractmethod
    def source(self) -> DeviceSource:
        """Open the source; there is one at a time."""

    def take(self, bytes_: int) -> None:
        """Let somebody have bytes of the second device, and nobody any others."""
        raise NotImplementedError

    def lose(self) -> None:
        """Let the second device be gone."""
        raise NotImplementedError

    def find(self) -> None:
        """Let it be back."""
        raise NotImplementedError


class DeviceSourceContract:
    """Tests of a source; a subclass has a fixture ``host``."""

    def test_devices_and_their_order_stay(self, host: DeviceHost) -> None:
        """Each poll gives the same devices in the same order, each once, with the host's name."""
        source = host.source()
        polls = [[device.id for device in source.poll().devices] for _ in range(3)]
        assert polls[0] == polls[1] == polls[2]
        assert len(set(polls[0])) == len(polls[0]) == 2
        assert {device.host for device in source.poll().devices} == {"here"}
        source.close()

    def test_a_device_of_nobody_is_free(self, host: DeviceHost) -> None:
        """It is healthy, and there is nothing to say about it."""
        source = host.source()
        for device in source.poll(own_pids=(1,)).devices:
            assert (device.healthy, device.lost, device.free, device.problem) == (
                True,
                False,
                True,
                "",
            )
        source.close()

    def test_a_device_can_be_shown_to_a_process(self, host: DeviceHost) -> None:
        """Devices with memory of their own have one variable, and each a name of its own there."""
        source = host.source()
        first, second = source.poll().devices
        if first.kind == "cpu":
            assert first.shown_by is second.shown_by is None
        else:
            assert first.shown_by is not None
            assert second.shown_by is not None
            (variable, name), (_, other) = first.shown_by, second.shown_by
            assert environment([first.shown_by]) == {variable: name}
            both = environment([second.shown_by, first.shown_by])
            assert both == {variable: f"{other},{name}"}
        source.close()

    def test_memory_is_what_is_free_of_it_now(self, host: DeviceHost) -> None:
        """Another reading shows what was taken or given back; unknown memory is None, not 0."""
        source = host.source()
        seen = []
        for taken in (0, 3 << 30, 1 << 30) if host.limited else ():
            host.take(taken)
            first, second = source.poll().devices
            assert first.memory_free_bytes is not None
            assert second.memory_bytes is not None
            assert second.memory_free_bytes is not None
            assert 0 <= second.memory_free_bytes <= second.memory_bytes
            seen.append(second.memory_free_bytes)
        if host.limited:
            assert [seen[0] - each for each in seen] == [0, 3 << 30, 1 << 30]
        else:
            assert {device.memory_free_bytes for device in source.poll().devices} == {None}
        source.close()

    def test_a_device_that_is_gone_is_not_healthy(self, host: DeviceHost) -> None:
        """Polls do not raise; it is neither free nor healthy until it is back; others stay."""
        if not host.breakable:
            pytest.skip("these devices are the processors of this host")
        source = host.source()
        host.lose()
        first, second = source.poll().devices
        assert (first.healthy, first.free) == (True, True)
        assert (second.healthy, second.lost, second.free) == (False, True, False)
        assert second.problem.startswith("it cannot be read (")
        assert "\n" not in second.problem
        assert second.shown_by is not None, "it is known all the same"
        host.find()
        assert [(d.healthy, d.lost, d.free, d.problem) for d in source.poll().devices] == [
            (True, False, True, "")
        ] * 2
        source.close()

    def test_nothing_is_reported_of_devices_that_are_well(self, host: DeviceHost) -> None:
        """There are no reports without a cause."""
        source = host.source()
        assert source.poll().xids == source.poll().xids == ()
        source.close()
