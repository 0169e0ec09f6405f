"""Contract tests for ledgers that several brokers share."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier
from typing import Any

import pytest

from optuna_hermes.errors import NotOwnerError, StaleEpochError, StudyFullError
from optuna_hermes.ledger import Ledger, TrialRecord
from optuna_hermes.model import Override, TrialStatus
from support.records import (
    OTHER,
    STUDY,
    UNICODE,
    checkpoint,
    event,
    host,
    lease,
    report,
    trial_record,
)

_EVER = 1e9
"""A limit under which every broker with a heartbeat counts as alive."""

_AT_ONCE = 0.0
"""A limit under which every broker counts as gone."""


def claim(
    ledger: Ledger,
    instance: str,
    number: int = 0,
    *,
    name: str = "b",
    dead_after_seconds: float = _EVER,
) -> TrialRecord | None:
    """Claim a trial for a broker."""
    return ledger.claim_trial(
        STUDY, number, host=name, instance=instance, dead_after_seconds=dead_after_seconds
    )


class SharingContract:
    """Tests of a ``ledger`` fixture; see ``LedgerContract``."""

    # -- hosts ---------------------------------------------------------------------------------

    def test_a_host_comes_back_as_it_was_last_heard_of(self, ledger: Ledger) -> None:
        """A broker has one row, with all fields of its last beat; two of one host have two."""
        ledger.beat(host("a2", name=UNICODE, devices=("GPU-1", "GPU-2"), load=0.1 + 0.2))
        ledger.beat(host("b1", name="b", load=1.0))
        ledger.beat(host("a1", name=UNICODE, devices=()))
        ledger.beat(host("b1", name="b", load=2.0, wants=(STUDY, UNICODE)))
        assert [replace(known, age_seconds=0.0) for known in ledger.load_hosts()] == [
            host("b1", name="b", load=2.0, wants=(STUDY, UNICODE)),
            host("a1", name=UNICODE, devices=()),
            host("a2", name=UNICODE, devices=("GPU-1", "GPU-2"), load=0.1 + 0.2),
        ]

    def test_a_silent_host_grows_old_and_a_beat_makes_it_young(self, ledger: Ledger) -> None:
        """Ages are seconds since the last beat; the age in the record is ignored."""
        begun = time.monotonic()
        ledger.beat(host("a1", age_seconds=500.0))
        ledger.beat(host("b1"))
        deadline = begun + 60
        while min(known.age_seconds for known in ledger.load_hosts()) < 0.3:
            assert time.monotonic() < deadline
        assert (
            max(known.age_seconds for known in ledger.load_hosts()) < time.monotonic() - begun + 1
        )
        ledger.beat(host("b1"))
        old, young = ledger.load_hosts()
        assert (old.instance, young.instance) == ("a1", "b1")
        assert old.age_seconds - young.age_seconds >= 0.25

    def test_a_host_that_lives_is_not_forgotten(self, ledger: Ledger) -> None:
        """A broker with a recent heartbeat cannot be forgotten, and keeps its leases."""
        ledger.beat(host("a1"))
        ledger.commit_lease(lease(1, owner="a1"))
        assert not ledger.forget_host("a1", dead_after_seconds=_EVER)
        assert ledger.load_leases() == [lease(1, owner="a1")]
        assert [known.instance for known in ledger.load_hosts()] == ["a1"]

    def test_a_host_that_is_gone_is_forgotten_with_its_leases(self, ledger: Ledger) -> None:
        """Its live leases end at their last reports, others and ended ones stay; twice is fine."""
        for instance in ("a1", "b1"):
            ledger.beat(host(instance))
        ledger.commit_lease(lease(1, owner="a1", ended=7.0))
        ledger.commit_lease(lease(2, owner="a1"))
        ledger.commit_lease(lease(3, owner="a1", number=None, study=OTHER))
        ledger.commit_lease(lease(4, owner="b1", number=1))
        ledger.commit_lease(lease(5, owner=None, number=2))
        ledger.add_report(report(1, 0.5, at=9.0))
        for _ in range(2):
            assert ledger.forget_host("a1", dead_after_seconds=_AT_ONCE)
        assert [held.ended for held in ledger.load_leases()] == [7.0, 9.0, 1.5, None, None]
        assert [known.instance for known in ledger.load_hosts()] == ["b1"]

    # -- owners --------------------------------------------------------------------------------

    def test_a_trial_is_written_by_its_owner_alone(self, ledger: Ledger) -> None:
        """Writing another broker's trial, or one without owner, raises with advice."""
        mine = trial_record(0, state="running", owner="a1")
        ledger.save_trial(mine, by="a1")
        for by in (None, "b1"):
            with pytest.raises(NotOwnerError, match=r"belongs to broker a1, so .*End its process"):
                ledger.save_trial(trial_record(0, state="done", owner=by), by=by)
        assert ledger.load_trials(STUDY) == [mine]
        done = trial_record(0, state="done", owner="a1")
        ledger.save_trial(done, by="a1")
        ledger.save_trial(trial_record(1))
        with pytest.raises(NotOwnerError, match=r"Trial 1 .*no broker, so broker a1 may not"):
            ledger.save_trial(trial_record(1, owner="a1"), by="a1")
        assert ledger.load_trials(STUDY) == [done, trial_record(1)]

    def test_a_trial_that_was_given_back_free_of_owner(self, ledger: Ledger) -> None:
        """Saving a trial without owner gives it back; its last owner has to claim it too."""
        ledger.save_trial(trial_record(0, state="running", owner="a1"), by="a1")
        back = trial_record(0, state="stored", tier="disk")
        ledger.save_trial(back, by="a1")
        with pytest.raises(NotOwnerError):
            ledger.save_trial(trial_record(0, state="running", owner="a1"), by="a1")
        assert ledger.load_trials(STUDY) == [back]

    def test_a_lease_is_its_owners_too(self, ledger: Ledger) -> None:
        """Only the owner of a trial gets a lease of it; a trial without a row is open to all."""
        ledger.save_trial(trial_record(0, owner="a1"), by="a1")
        ledger.save_trial(trial_record(1))
        for stranger in (lease(1, owner="b1"), lease(1), lease(1, number=1, owner="a1")):
            with pytest.raises(NotOwnerError, match="End its process"):
                ledger.commit_lease(stranger)
        assert ledger.load_leases() == []
        rightful = [lease(1, owner="a1"), lease(2, number=1), lease(3, number=2, owner="b1")]
        for granted in rightful:
            ledger.commit_lease(granted)
        assert ledger.load_leases() == rightful

    def test_a_batch_with_a_trial_of_another_writes_nothing(self, ledger: Ledger) -> None:
        """If another broker has claimed one trial of a batch, nothing of the batch is written."""
        ledger.save_trial(trial_record(0, state="running", owner="b1"))

        def write() -> None:
            with ledger.batch():
                ledger.add_report(report(1, 0.5))
                ledger.commit_lease(lease(1, number=7, owner="a1"))
                ledger.save_trial(trial_record(0, state="stored", owner="a1"), by="a1")

        with pytest.raises(NotOwnerError):
            write()
        assert ledger.load_curves(STUDY) == {}
        assert ledger.load_leases() == []
        assert ledger.last_epoch() == 0

    # -- claims --------------------------------------------------------------------------------

    @pytest.mark.parametrize("state", ["pending", "stored"])
    def test_a_trial_that_waits_and_free_of_owner_can_be_claimed(
        self, ledger: Ledger, state: TrialStatus
    ) -> None:
        """The first broker that claims it owns it, on any host; its other fields stay."""
        for instance in ("a1", "b1"):
            ledger.beat(host(instance, name=instance[0]))
        waiting = trial_record(
            0, state=state, tier="disk", host="a", units=7, slices=2, updated=1.5
        )
        ledger.save_trial(waiting)
        ledger.save_checkpoint(checkpoint("/a"))
        taken = replace(waiting, state="stored", host="b", owner="b1")
        assert claim(ledger, "b1") == taken
        assert claim(ledger, "a1", name="a") is None
        assert claim(ledger, "b1") == taken
        assert ledger.load_trials(STUDY) == [taken]

    def test_what_is_not_there_or_over_cannot_be_claimed(self, ledger: Ledger) -> None:
        """Claims of an unknown trial, an ended one, and one of another study fail."""
        trials = [trial_record(0, state="done"), trial_record(1, state="failed", owner="a1")]
        for record in trials:
            ledger.save_trial(record, by=record.owner)
        ledger.save_trial(trial_record(2, study=OTHER))
        for number in range(3):
            assert claim(ledger, "b1", number, dead_after_seconds=_AT_ONCE) is None
        assert ledger.load_trials(STUDY) == trials

    @pytest.mark.parametrize("state", ["pending", "running", "parked", "stored"])
    def test_a_trial_is_its_owners_until_he_is_gone(
        self, ledger: Ledger, state: TrialStatus
    ) -> None:
        """Claims fail while its owner's heartbeat is recent, and succeed when it is too old."""
        ledger.beat(host("a1", name="a"))
        held = trial_record(0, state=state, owner="a1", host="a", tier="host")
        ledger.save_trial(held, by="a1")
        assert claim(ledger, "b1") is None
        assert ledger.load_trials(STUDY) == [held]
        taken = claim(ledger, "b1", dead_after_seconds=_AT_ONCE)
        assert taken == replace(held, state="pending", tier=None, host="b", owner="b1")
        with pytest.raises(NotOwnerError, match="belongs to broker b1, so broker a1 may not"):
            ledger.save_trial(replace(held, state="stored"), by="a1")

    def test_a_trial_that_was_taken_from_its_holder_is_stored(self, ledger: Ledger) -> None:
        """It goes on at its checkpoint, and its leases have ended; those of others stay."""
        ledger.save_trial(trial_record(0, state="running", owner="a1", host="a"), by="a1")
        ledger.save_checkpoint(checkpoint("/a"))
        ledger.commit_lease(lease(1, owner="a1"))
        ledger.commit_lease(lease(2, number=1, owner="a1"))
        ledger.commit_lease(lease(3, study=OTHER, owner="a1"))
        taken = claim(ledger, "b1")
        assert taken is not None
        assert (taken.state, taken.tier, taken.owner) == ("stored", "disk", "b1")
        assert [held.ended is None for held in ledger.load_leases()] == [False, True, True]

    def test_an_owner_that_was_forgotten_is_gone(self, ledger: Ledger) -> None:
        """A broker that shuts down in order leaves its trials to the others at once."""
        ledger.beat(host("a1", name="a"))
        ledger.save_trial(trial_record(0, state="stored", owner="a1"), by="a1")
        assert claim(ledger, "b1") is None
        ledger.forget_host("a1", dead_after_seconds=_AT_ONCE)
        assert claim(ledger, "b1") is not None

    def test_two_brokers_of_one_host_are_two(self, ledger: Ledger) -> None:
        """Two users of one machine each have a broker: neither takes what the other trains."""
        for instance in ("a1", "a2"):
            ledger.beat(host(instance, name="a"))
        ledger.save_trial(trial_record(0, state="running", owner="a1", host="a"), by="a1")
        assert claim(ledger, "a2", name="a") is None

    @pytest.mark.parametrize("state", ["running", "parked"])
    def test_what_has_no_owner_and_a_process_is_its_hosts(
        self, ledger: Ledger, state: TrialStatus
    ) -> None:
        """A trial of a broker on its own has no owner: its host, or later others, may claim it."""
        ledger.beat(host("a1", name="a"))
        for number, name in enumerate(("a", "b", "c", None)):
            ledger.save_trial(trial_record(number, state=state, host=name))
        won = [claim(ledger, "b1", number) is not None for number in range(4)]
        assert won == [False, True, True, True]
        assert claim(ledger, "b1", dead_after_seconds=_AT_ONCE) is not None

    def test_threads_claim_trials_and_each_has_one_winner(self, ledger: Ledger) -> None:
        """Of several brokers that claim a trial at once one wins, and is the row's owner."""
        threads, trials = 4, 10
        for number in range(trials):
            ledger.save_trial(trial_record(number, state="stored"))
        for thread in range(threads):
            ledger.beat(host(str(thread), name=str(thread)))
        start = Barrier(threads)

        def race(instance: str) -> list[int]:
            won = []
            for number in range(trials):
                start.wait(timeout=60)
                if claim(ledger, instance, number, name=instance) is not None:
                    won.append(number)
            return won

        with ThreadPoolExecutor(threads) as pool:
            won = list(pool.map(race, map(str, range(threads))))
        assert sorted(number for each in won for number in each) == list(range(trials))
        owners = [int(record.owner or -1) for record in ledger.load_trials(STUDY)]
        assert owners == [
            next(thread for thread in range(threads) if number in won[thread])
            for number in range(trials)
        ]

    def test_an_owner_that_writes_while_it_is_claimed_is_told(self, ledger: Ledger) -> None:
        """Writes of the old owner come before the claim and are in it, or are refused."""
        rounds = 10
        start = Barrier(2)

        def write(number: int) -> int:
            start.wait(timeout=60)
            for units in range(1, 1_000_000):
                try:
                    ledger.save_trial(
                        trial_record(number, state="running", owner="a1", units=units), by="a1"
                    )
                except NotOwnerError:
                    return units - 1
            raise AssertionError("It was never claimed.")

        def take(number: int) -> Any:
            start.wait(timeout=60)
            deadline = time.monotonic() + 60
            # A claim may fail while another transaction is writing the row.
            while (taken := claim(ledger, "b1", number)) is None:
                assert time.monotonic() < deadline
            return taken

        with ThreadPoolExecutor(2) as pool:
            for number in range(rounds):
                ledger.save_trial(trial_record(number, state="running", owner="a1"), by="a1")
                writer, taker = pool.submit(write, number), pool.submit(take, number)
                written, taken = writer.result(timeout=60), taker.result(timeout=60)
                assert taken.units == written
                assert ledger.load_trials(STUDY)[number] == taken

    # -- changes -------------------------------------------------------------------------------

    def test_what_has_changed_is_found_by_its_number(self, ledger: Ledger) -> None:
        """Writes of a trial's row, owner, override or checkpoints are changes of it."""
        for number in range(3):
            ledger.save_trial(trial_record(number))
        ledger.save_trial(trial_record(0, study=OTHER))
        assert [trial.number for _, trial in ledger.load_changed(STUDY, 0)] == [0, 1, 2]

        def changed(write: Callable[[], object]) -> list[tuple[Override | None, TrialRecord]]:
            before = ledger.change_mark().change
            write()
            assert ledger.change_mark().change > before
            return ledger.load_changed(STUDY, before)

        saved = trial_record(1, units=3)
        assert changed(lambda: ledger.save_trial(saved)) == [(None, saved)]
        assert changed(lambda: ledger.save_override(STUDY, 1, "held")) == [("held", saved)]
        assert changed(lambda: ledger.save_override(STUDY, 1, None)) == [(None, saved)]
        mine = replace(trial_record(2), host="b", owner="b1", state="pending", tier=None)
        assert changed(lambda: claim(ledger, "b1", 2)) == [(None, mine)]
        new = checkpoint("/a", number=0)
        assert changed(lambda: ledger.save_checkpoint(new)) == [(None, trial_record(0))]
        dropped = changed(lambda: ledger.drop_checkpoint(STUDY, 0, "/a"))
        assert dropped == [(None, trial_record(0))]
        # Of leases the newest epochs tell, and of brokers the look itself.
        assert changed(lambda: ledger.commit_lease(lease(1))) == []
        assert changed(lambda: ledger.name_lease(1, 0)) == []
        assert changed(lambda: ledger.end_lease(1, 2.0)) == []
        assert changed(lambda: ledger.forget_host("a1", dead_after_seconds=_AT_ONCE)) == []
        before = ledger.change_mark()
        ledger.beat(host("a1"))
        ledger.add_report(report(1, 0.5))
        assert ledger.change_mark().change == before.change
        assert [each.instance for each in ledger.change_mark().hosts] == ["a1"]
        both = ledger.change_mark(host("b1")).hosts
        assert [each.instance for each in both] == ["a1", "b1"]
        assert ledger.load_changed(STUDY, before.change) == []
        wanted = ledger.load_changed(STUDY, before.change, [1, 9])
        assert wanted == [(None, saved)]

    def test_the_removal_of_rows_is_a_change(self, ledger: Ledger) -> None:
        """Whoever looks sees that rows were removed after the number that it knows."""
        ledger.save_trial(trial_record(0))
        before = ledger.change_mark()
        assert before.forgotten == 0
        ledger.forget_study(STUDY)
        assert ledger.change_mark().forgotten == ledger.change_mark().change > before.change

    def test_a_batch_that_fails_changes_nothing(self, ledger: Ledger) -> None:
        """Its number is not taken, and the next change has a number of its own."""
        ledger.save_trial(trial_record(0, owner="a1"), by="a1")
        before = ledger.change_mark().change

        def write() -> None:
            with ledger.batch():
                ledger.save_trial(trial_record(1))
                ledger.save_trial(trial_record(0), by="b1")

        with pytest.raises(NotOwnerError):
            write()
        assert ledger.change_mark().change == before
        with ledger.batch():
            ledger.save_trial(trial_record(2))
            ledger.save_trial(trial_record(3))
        ledger.save_trial(trial_record(4))
        assert ledger.change_mark().change == before + 2
        assert [trial.number for _, trial in ledger.load_changed(STUDY, before + 1)] == [4]

    def test_no_change_is_committed_behind_a_reader(self, ledger: Ledger) -> None:
        """A reader that goes on from the number it knows, while several write, has every row."""
        threads, rounds, each = 3, 25, 3
        left = Barrier(threads + 1)

        def write(thread: int) -> None:
            for units in range(1, rounds + 1):
                with ledger.batch():
                    for number in range(thread, threads * each, threads):
                        ledger.save_trial(trial_record(number, units=units))
            left.wait(timeout=120)

        seen: dict[int, TrialRecord] = {}
        with ThreadPoolExecutor(threads) as pool:
            writers = [pool.submit(write, thread) for thread in range(threads)]
            change, last = 0, False
            while True:
                last = left.n_waiting == threads
                number = ledger.change_mark().change
                seen.update((x.number, x) for _, x in ledger.load_changed(STUDY, change))
                change = number
                if last:
                    break
            left.wait(timeout=120)
            for writer in writers:
                writer.result(timeout=120)
        assert list(seen[number] for number in sorted(seen)) == ledger.load_trials(STUDY)
        assert {x.units for x in seen.values()} == {rounds}

    # -- a bound on new trials -----------------------------------------------------------------

    def test_new_trials_are_bounded_over_all_hosts(self, ledger: Ledger) -> None:
        """Runs and live leases of new trials count towards the limit; other studies do not."""
        ledger.save_trial(trial_record(0, state="done"))
        ledger.commit_lease(lease(1, number=0), limit=1)
        ledger.commit_lease(lease(2, number=None, ended=2.0), limit=2)
        ledger.commit_lease(lease(3, number=None, study=OTHER))
        ledger.commit_lease(lease(4, number=None), limit=2)
        with pytest.raises(StudyFullError, match=r"at most 2 trials, and has 2 .*no further trial"):
            ledger.commit_lease(lease(5, number=None), limit=2)
        ledger.name_lease(4, 1)
        with pytest.raises(StudyFullError):
            ledger.commit_lease(lease(5, number=None), limit=2)
        ledger.save_trial(trial_record(1))
        with pytest.raises(StudyFullError):
            ledger.commit_lease(lease(5, number=None), limit=2)
        ledger.commit_lease(lease(5, number=None), limit=3)
        ledger.commit_lease(lease(6, number=None))

    def test_a_host_that_is_gone_gives_its_new_trials_back(self, ledger: Ledger) -> None:
        """A lease whose broker died before its trial was created counts until it is forgotten."""
        ledger.beat(host("a1"))
        ledger.commit_lease(lease(1, number=None, owner="a1"), limit=1)
        with pytest.raises(StudyFullError):
            ledger.commit_lease(lease(2, number=None, owner="b1"), limit=1)
        ledger.forget_host("a1", dead_after_seconds=_AT_ONCE)
        ledger.commit_lease(lease(2, number=None, owner="b1"), limit=1)

    def test_threads_open_as_many_trials_as_there_may_be(self, ledger: Ledger) -> None:
        """Brokers that grant and save new trials at the same time stop at the bound together."""
        threads, limit = 4, 6

        def broker(instance: str) -> int:
            opened = 0
            while True:
                epoch = ledger.last_epoch() + 1
                try:
                    ledger.commit_lease(lease(epoch, number=None, owner=instance), limit=limit)
                except StaleEpochError:
                    continue
                except StudyFullError:
                    return opened
                opened += 1
                with ledger.batch():
                    ledger.name_lease(epoch, epoch)
                    ledger.save_trial(
                        trial_record(epoch, state="running", owner=instance), by=instance
                    )

        with ThreadPoolExecutor(threads) as pool:
            opened = list(pool.map(broker, map(str, range(threads))))
        assert sum(opened) == limit == len(ledger.load_trials(STUDY))

    # -- clearing away -------------------------------------------------------------------------

    def test_a_forgotten_study_leaves_nothing_but_its_epochs(self, ledger: Ledger) -> None:
        """All rows of that study are removed, those of others stay, and no epoch is reused."""
        for study in (STUDY, OTHER):
            epoch = ledger.last_epoch() + 1
            ledger.save_trial(trial_record(0, study=study))
            ledger.add_report(report(1, 0.5, study=study))
            ledger.commit_lease(lease(epoch, study=study))
            ledger.save_checkpoint(checkpoint("/a", study=study))
            ledger.save_memory(study, 1)
            ledger.add_event(event("parked", study=study))
        assert ledger.load_studies() == [OTHER, STUDY]
        ledger.forget_study(OTHER)
        ledger.forget_study(OTHER)
        assert ledger.load_studies() == [STUDY]
        assert (ledger.load_trials(OTHER), ledger.load_curves(OTHER)) == ([], {})
        assert (ledger.load_leases(OTHER), ledger.load_checkpoints(OTHER)) == ([], [])
        assert (ledger.load_memory(OTHER), ledger.load_events(OTHER)) == (None, [])
        assert ledger.load_curves(STUDY)[0].values == (0.5,)
        assert ledger.last_epoch() == 2
        with pytest.raises(StaleEpochError):
            ledger.commit_lease(lease(2))

    @pytest.mark.parametrize("kind", ["trial", "report", "lease", "checkpoint", "memory", "event"])
    def test_whatever_is_left_of_a_study_names_it(self, ledger: Ledger, kind: str) -> None:
        """A study is listed by any row, so that rows of a deleted study can be removed."""
        leave = {
            "trial": lambda: ledger.save_trial(trial_record(0)),
            "report": lambda: ledger.add_report(report(1, 0.5)),
            "lease": lambda: ledger.commit_lease(lease(1)),
            "checkpoint": lambda: ledger.save_checkpoint(checkpoint("/a")),
            "memory": lambda: ledger.save_memory(STUDY, None),
            "event": lambda: ledger.add_event(event("parked")),
        }
        leave[kind]()
        assert ledger.load_studies() == [STUDY]
        ledger.forget_study(STUDY)
        assert ledger.load_studies() == []

    def test_old_events_are_trimmed(self, ledger: Ledger) -> None:
        """Events from before a time are removed and counted; other studies keep theirs."""
        for at in (1.0, 5.0, 3.0):
            ledger.add_event(event(f"at {at}", at=at))
        ledger.add_event(event("at 1.0", at=1.0, study=OTHER))
        ledger.add_event(event("at 4.0", at=4.0, number=None))
        assert ledger.first_events(STUDY) == {0: 1.0}
        assert [ledger.count_events(STUDY, before) for before in (1.0, 3.0, 9.0)] == [0, 1, 4]
        assert ledger.trim_events(STUDY, 3.0) == 1
        assert ledger.trim_events(STUDY, 3.0) == 0
        assert [line.at for line in ledger.load_events(STUDY)] == [5.0, 3.0, 4.0]
        assert len(ledger.load_events(OTHER)) == 1
