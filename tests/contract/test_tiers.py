"""Every tier keeps the contract of tiers."""

from __future__ import annotations

from pathlib import Path

import pytest

from optuna_hermes.suspend import CleanPoint, Footprint, read, write
from optuna_hermes.suspend._tiers._host import HostTier
from optuna_hermes.suspend._tiers._tier_mover import resident
from support.disk_tier import DiskTier
from support.tier_contract import STEPS, Tier, TierContract, Training, uninterrupted


class ResidentTier:
    """The resident tier: nothing moves."""

    def suspend(self, state: CleanPoint) -> Footprint:
        return resident(state)

    def resume(self) -> None:
        pass


class TestResident(TierContract):
    """On the device."""

    @pytest.fixture
    def tier(self) -> Tier:
        """Nothing moves."""
        return ResidentTier()

    def test_nothing_is_copied(self, tier: Tier, training: Training) -> None:
        """The trial keeps its memory, and takes no other."""
        held = tier.suspend(training)
        assert (held.device_bytes, held.host_bytes) == (training.held_bytes(), 0)


class TestHost(TierContract):
    """In host memory."""

    needs = "can_offload"

    @pytest.fixture
    def tier(self) -> Tier:
        """A tier that has not been used."""
        return HostTier()

    def test_the_device_is_given_back(self, tier: Tier, training: Training) -> None:
        """No tensor has memory while the trial waits; a small trial takes little of the host's."""
        held = tier.suspend(training)
        assert (held.device_bytes, held.host_bytes) == (0, 1 << 20)
        assert training.held_bytes() == 0

    def test_a_trial_goes_on_to_disk_without_its_device(
        self, training: Training, tmp_path: Path
    ) -> None:
        """The tree in host memory is the whole state of the trial, whose tensors stay empty."""
        host = HostTier()
        host.suspend(training)
        stored = write(tmp_path, host.tree(), trial=training.name, units=training.units)
        assert training.held_bytes() == 0
        found = read([stored], training.name, tmp_path)
        assert found is not None
        again = Training(seed=99)
        again.load(found[1])
        again.train(STEPS)
        assert again.values() == uninterrupted()


class TestDisk(TierContract):
    """In a file."""

    needs = "can_store"
    in_place = False

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Tier:
        """A folder of the trial's own; the ledger knows nothing."""
        return DiskTier(tmp_path / "run", lambda: ())
