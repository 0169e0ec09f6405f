"""Contract tests for ledgers."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from threading import Barrier
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from optuna_hermes.errors import StaleEpochError
from optuna_hermes.ledger import Ledger
from support.memory_ledger import MemoryLedger
from support.records import (
    OTHER,
    STUDY,
    UNICODE,
    Operation,
    apply,
    checkpoint,
    content,
    event,
    lease,
    leases,
    operations,
    report,
    trial_record,
)
from support.sharing_contract import SharingContract

_STUDIES = count()
_PROPERTY = settings(
    max_examples=20,
    deadline=None,
    database=None,
    # The ledger of one test serves all its examples: each has a study of its own.
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
)


class LedgerContract(SharingContract):
    """Subclass it, and give it a ``ledger`` fixture: a new, empty ledger for each test.

    A ledger that outlives its process also overrides the ``reopen`` fixture: a function that
    opens the same ledger once more.

    Example:
        >>> class TestMine(LedgerContract):
        ...     @pytest.fixture
        ...     def ledger(self) -> Ledger:
        ...         return MemoryLedger()
    """

    @pytest.fixture
    def ledger(self) -> Ledger:
        """Override it: the ledger under test, new and empty."""
        raise NotImplementedError("A LedgerContract needs a `ledger` fixture.")

    @pytest.fixture
    def reopen(self) -> Callable[[], Ledger]:
        """Override it for a ledger that outlives its process."""
        pytest.skip("This ledger ends with its process.")

    def test_a_new_ledger_is_empty(self, ledger: Ledger) -> None:
        """A study that was never written to has nothing, and the first epoch is still free."""
        assert content(ledger, STUDY) == content(MemoryLedger(), STUDY)
        assert ledger.load_leases() == []
        assert ledger.last_epoch() == 0

    def test_a_trial_comes_back_as_it_went_in(self, ledger: Ledger) -> None:
        """Every field of a trial is kept, the unset ones as None."""
        full = trial_record(
            1,
            state="stored",
            tier="disk",
            host=UNICODE,
            trial_id=2**40,
            units=7,
            slices=3,
            suspensions=2,
            device_seconds=0.1 + 0.2,
            submitted=1_700_000_000.123456,
            updated=1e300,
        )
        ledger.save_trial(full)
        ledger.save_trial(trial_record(0))
        assert ledger.load_trials(STUDY) == [trial_record(0), full]

    def test_save_trial_replaces_the_row_of_that_study_and_number(self, ledger: Ledger) -> None:
        """A trial has one row, the last one saved; a namesake in another study keeps its own."""
        ledger.save_trial(trial_record(0, state="running", tier=None, host="a"))
        ledger.save_trial(trial_record(0, study=OTHER))
        ledger.save_trial(trial_record(0, state="parked", tier="host"))
        ledger.save_trial(trial_record(0, state="parked", tier="host"))
        assert ledger.load_trials(STUDY) == [trial_record(0, state="parked", tier="host")]
        assert ledger.load_trials(OTHER) == [trial_record(0, study=OTHER)]

    def test_an_override_outlives_the_rows_that_replace_its_trial(self, ledger: Ledger) -> None:
        """A user's override of a trial stays until it is changed, whichever broker saves it."""
        ledger.save_trial(trial_record(0))
        ledger.save_trial(trial_record(1))
        ledger.save_override(STUDY, 0, "boosted")
        ledger.save_override(STUDY, 0, "held")
        ledger.save_override(STUDY, 1, "boosted")
        ledger.save_override(STUDY, 7, "held")  # of an unknown trial
        ledger.save_trial(trial_record(0, state="running", owner="a"))
        assert ledger.load_overrides(STUDY) == {0: "held", 1: "boosted"}
        assert ledger.load_overrides(OTHER) == {}
        ledger.save_override(STUDY, 0, None)
        ledger.save_trial(trial_record(7))
        assert ledger.load_overrides(STUDY) == {1: "boosted"}

    def test_studies_that_differ_in_case_or_accent_are_apart(self, ledger: Ledger) -> None:
        """A key names one study, to the letter."""
        for key in ("key", "KEY", "kéy", UNICODE):
            ledger.save_trial(trial_record(0, study=key))
        assert ledger.load_trials("KEY") == [trial_record(0, study="KEY")]
        assert ledger.load_trials(UNICODE) == [trial_record(0, study=UNICODE)]

    def test_each_trial_has_a_curve(self, ledger: Ledger) -> None:
        """Curves are those of this study, of all its trials or of those asked for."""
        for record in (report(1, 0.9), report(1, 0.7, number=3), report(2, 0.5)):
            ledger.add_report(record)
        ledger.add_report(report(1, 0.1, study=OTHER))
        curves = ledger.load_curves(STUDY)
        assert list(curves) == [0, 3]
        assert (curves[0].steps, curves[0].values) == ((10, 20), (0.9, 0.5))
        assert curves[0].device_seconds == (1.0, 2.0)
        assert curves[3].values == (0.7,)
        assert ledger.load_curves(STUDY, [3, 7]) == {3: curves[3]}
        assert ledger.load_curves(STUDY, []) == {}

    def test_a_trial_that_went_back_has_the_curve_of_its_present_life(self, ledger: Ledger) -> None:
        """After a crash units are reported again; later ones are not, until they are reached."""
        for record in (report(1, 0.9), report(2, 0.5, at=9.0), report(3, 0.4)):
            ledger.add_report(record)
        ledger.add_report(report(2, 0.6, at=1.0))  # even if clocks differ
        assert ledger.load_curves(STUDY)[0].values == (0.9, 0.6)
        assert ledger.load_step_values(STUDY, [0, 1]) == {0: {10: 0.9, 20: 0.6, 30: None}}

    def test_reports_are_read_on_from_where_they_were_read_to(self, ledger: Ledger) -> None:
        """Reports are returned as written, in order; ``after`` leaves out those read before."""
        records = [report(2, 0.5, at=9.0), report(1, math.inf), report(1, 0.7, number=3, at=1.0)]
        ledger.add_report(report(7, 0.1, study=OTHER))
        for record in records:
            ledger.add_report(record)
        found = ledger.load_reports(STUDY)
        assert [record for _, record in found] == records
        positions = [position for position, _ in found]
        assert positions == sorted(set(positions))
        assert ledger.load_reports(STUDY, after=positions[0]) == found[1:]
        ledger.add_report(report(1, 0.6, number=3))
        (newest,) = ledger.load_reports(STUDY, after=positions[-1])
        assert newest[1] == report(1, 0.6, number=3)
        ledger.forget_study(STUDY)
        assert ledger.load_reports(STUDY) == []

    def test_values_that_are_no_numbers_come_back(self, ledger: Ledger) -> None:
        """A value that is NaN or infinite is kept as it is."""
        for unit, value in enumerate((math.nan, math.inf, -math.inf, 5e-324, 0.1), start=1):
            ledger.add_report(report(unit, value))
        values = ledger.load_curves(STUDY)[0].values
        assert math.isnan(values[0])
        assert values[1:] == (math.inf, -math.inf, 5e-324, 0.1)

    def test_a_lease_comes_back_as_it_went_in(self, ledger: Ledger) -> None:
        """Every field of a lease is kept, several devices and a far epoch too."""
        first = lease(1, devices=("a/GPU-1", "a/GPU-2"), host=UNICODE)
        second = lease(2**40, number=None, study=OTHER)
        ledger.commit_lease(first)
        ledger.commit_lease(second)
        assert ledger.load_leases() == [first, second]
        assert ledger.load_leases(OTHER) == [second]
        assert ledger.load_leases(OTHER, live=True) == [second]
        assert ledger.last_epoch() == 2**40

    @pytest.mark.parametrize("epoch", [5, 4, 0, -1])
    def test_an_epoch_that_is_not_above_all_others_is_refused(
        self, ledger: Ledger, epoch: int
    ) -> None:
        """A stale lease raises and writes nothing, even in another study and after the end."""
        ledger.commit_lease(lease(5))
        ledger.end_lease(5, 2.0)
        with pytest.raises(StaleEpochError, match=rf"above every earlier one.*\b5\b.*{epoch}"):
            ledger.commit_lease(lease(epoch, study=OTHER))
        assert ledger.load_leases() == [lease(5, ended=2.0)]
        assert ledger.load_leases(live=True) == []

    def test_the_first_epoch_is_above_zero(self, ledger: Ledger) -> None:
        """Epoch 0 means "none yet", so no lease has it."""
        with pytest.raises(StaleEpochError):
            ledger.commit_lease(lease(0))
        assert ledger.load_leases() == []

    def test_a_lease_learns_its_trial(self, ledger: Ledger) -> None:
        """The lease of a new trial gets its number; others stay, unknown epochs do nothing."""
        ledger.commit_lease(lease(1, number=None))
        ledger.commit_lease(lease(2, number=None))
        ledger.name_lease(1, 7)
        ledger.name_lease(9, 7)
        assert ledger.load_leases() == [lease(1, number=7), lease(2, number=None)]

    def test_a_lease_ends_once(self, ledger: Ledger) -> None:
        """The first end stays; ending an unknown lease is no error."""
        ledger.commit_lease(lease(1))
        ledger.commit_lease(lease(2))
        ledger.end_lease(1, 4.0)
        ledger.end_lease(1, 9.0)
        ledger.end_lease(3, 9.0)
        assert ledger.load_leases() == [lease(1, ended=4.0), lease(2)]

    def test_a_lease_that_nobody_saw_end_ends_at_the_last_report(self, ledger: Ledger) -> None:
        """Of its own trial, and not before it began; one that has ended stays."""
        for number in (0, 1, None):
            ledger.commit_lease(lease(ledger.last_epoch() + 1, number=number, started=4.0))
        ledger.commit_lease(lease(4, number=0, started=4.0, ended=5.0))
        for at in (6.0, 8.0, 7.0):
            ledger.add_report(report(1, 0.5, at=at))
        ledger.add_report(report(1, 0.5, at=9.0, study=OTHER))
        ledger.add_report(report(1, 0.5, number=1, at=3.0))
        for epoch in range(6):
            ledger.end_lease(epoch, None)
        assert [each.ended for each in ledger.load_leases()] == [8.0, 4.0, 4.0, 5.0]

    def test_leases_since_an_epoch(self, ledger: Ledger) -> None:
        """With ``since`` only leases of that epoch and later ones are loaded."""
        for epoch in (1, 4, 9):
            ledger.commit_lease(lease(epoch))
        ledger.end_lease(4, 2.0)
        assert [each.epoch for each in ledger.load_leases(STUDY, since=4)] == [4, 9]
        assert [each.epoch for each in ledger.load_leases(STUDY, since=4, live=True)] == [9]

    def test_checkpoints_come_oldest_first(self, ledger: Ledger) -> None:
        """Checkpoints are in the order of saving, for any clocks, and a trial has only its own."""
        first = checkpoint(f"/{UNICODE}/1", at=9.0)
        second = checkpoint("/2", number=1)
        third = checkpoint("/3", at=1.0)
        for record in (first, second, third):
            ledger.save_checkpoint(record)
        assert ledger.load_checkpoints(STUDY) == [first, second, third]
        assert ledger.load_checkpoints(STUDY, [0]) == [first, third]
        assert ledger.load_checkpoints(OTHER) == []

    def test_a_dropped_checkpoint_is_forgotten(self, ledger: Ledger) -> None:
        """Only that path of that study goes; dropping it again is no error."""
        for record in (checkpoint("/a"), checkpoint("/A"), checkpoint("/a", study=OTHER)):
            ledger.save_checkpoint(record)
        ledger.drop_checkpoint(STUDY, 0, "/a")
        ledger.drop_checkpoint(STUDY, 0, "/a")
        assert ledger.load_checkpoints(STUDY) == [checkpoint("/A")]
        assert ledger.load_checkpoints(OTHER) == [checkpoint("/a", study=OTHER)]

    def test_each_host_has_a_memory(self, ledger: Ledger) -> None:
        """Policies of hosts that share a study do not overwrite each other's."""
        ledger.save_memory(STUDY, {"a": 1}, "a")
        ledger.save_memory(STUDY, None, "b")
        ledger.save_memory(STUDY, 2, UNICODE)
        ledger.save_memory(STUDY, {"a": 3}, "a")
        found = [ledger.load_memory(STUDY, host) for host in ("a", "b", UNICODE, "c")]
        assert found == [{"a": 3}, None, 2, None]
        assert ledger.load_memory(STUDY) is None

    def test_memory_is_replaced(self, ledger: Ledger) -> None:
        """A study has one memory, the last one saved, of any JSON shape; None can be saved."""
        for memory in ({"a": [1, 2.5, None, True]}, [UNICODE, {"nul": "\0"}], 3, None):
            ledger.save_memory(STUDY, memory)
            ledger.save_memory(OTHER, "other")
            assert ledger.load_memory(STUDY) == memory
        assert ledger.load_memory(OTHER) == "other"

    def test_what_was_saved_is_out_of_reach(self, ledger: Ledger) -> None:
        """Changing a value after it was saved, or after it was loaded, changes no ledger."""
        memory: dict[str, Any] = {"list": [1]}
        detail: dict[str, Any] = {"list": [1]}
        ledger.save_memory(STUDY, memory)
        ledger.add_event(event("kind", detail=detail))
        for mine in (
            memory,
            detail,
            ledger.load_memory(STUDY),
            ledger.load_events(STUDY)[0].detail,
        ):
            mine["list"].append(2)
        assert ledger.load_memory(STUDY) == {"list": [1]}
        assert ledger.load_events(STUDY)[0].detail == {"list": [1]}

    def test_what_is_not_json_is_refused(self, ledger: Ledger) -> None:
        """A memory or a detail that is not JSON raises at once and is not written."""
        ledger.save_memory(STUDY, "before")
        with pytest.raises(TypeError):
            ledger.save_memory(STUDY, {"a": object()})
        with pytest.raises(TypeError):
            ledger.add_event(event("kind", detail={"a": object()}))
        assert ledger.load_memory(STUDY) == "before"
        assert ledger.load_events(STUDY) == []

    def test_events_come_oldest_first(self, ledger: Ledger) -> None:
        """Events keep the order of writing; those of one trial can be loaded alone."""
        first = event("admitted", at=9.0, detail={UNICODE: {"deep": [1.5, None]}})
        second = event("opened", number=None)
        third = event("admitted", number=1)
        fourth = event("parked", at=1.0)
        for record in (first, second, third, fourth):
            ledger.add_event(record)
        ledger.add_event(event("admitted", study=OTHER))
        assert ledger.load_events(STUDY) == [first, second, third, fourth]
        assert ledger.load_events(STUDY, 0) == [first, fourth]

    def test_a_batch_is_written_together(self, ledger: Ledger) -> None:
        """After the block all writes are visible, and single writes work as before."""
        with ledger.batch():
            ledger.commit_lease(lease(1))
            ledger.save_trial(trial_record(0))
            ledger.add_report(report(1, 0.5))
        ledger.end_lease(1, 2.0)
        assert ledger.load_leases() == [lease(1, ended=2.0)]
        assert ledger.load_trials(STUDY) == [trial_record(0)]
        assert ledger.load_curves(STUDY)[0].values == (0.5,)

    def test_a_batch_that_fails_writes_nothing(self, ledger: Ledger) -> None:
        """A stale epoch undoes what the block wrote before it."""
        ledger.commit_lease(lease(5))

        def write() -> None:
            with ledger.batch():
                ledger.save_trial(trial_record(0))
                ledger.commit_lease(lease(5))

        with pytest.raises(StaleEpochError):
            write()
        assert ledger.load_trials(STUDY) == []
        ledger.save_trial(trial_record(1))
        assert ledger.load_trials(STUDY) == [trial_record(1)]

    def test_threads_race_for_each_epoch_and_one_wins(self, ledger: Ledger) -> None:
        """Of several threads that commit one epoch, one succeeds and the others get an error."""
        threads, rounds = 4, 5
        start = Barrier(threads)

        def race(host: str) -> list[int]:
            wins = []
            for epoch in range(1, rounds + 1):
                start.wait(timeout=60)
                try:
                    ledger.commit_lease(lease(epoch, host=host))
                    wins.append(epoch)
                except StaleEpochError:
                    pass
            return wins

        with ThreadPoolExecutor(threads) as pool:
            won = list(pool.map(race, map(str, range(threads))))
        assert sorted(epoch for wins in won for epoch in wins) == list(range(1, rounds + 1))
        assert [int(held.host) for held in ledger.load_leases()] == [
            next(thread for thread, wins in enumerate(won) if epoch in wins)
            for epoch in range(1, rounds + 1)
        ]

    def test_threads_add_one_trial_at_once(self, ledger: Ledger) -> None:
        """Several threads that save the same new trial all succeed, and it has one row."""
        threads, rounds = 4, 10
        start = Barrier(threads)

        def save(thread: int) -> None:
            for number in range(rounds):
                start.wait(timeout=60)
                ledger.save_trial(trial_record(number, units=thread))
                ledger.save_memory(f"{STUDY} {number}", thread)

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(save, range(threads)))
        assert [record.number for record in ledger.load_trials(STUDY)] == list(range(rounds))
        assert ledger.load_memory(STUDY + " 0") in range(threads)

    def test_threads_write_at_once_and_nothing_is_lost(self, ledger: Ledger) -> None:
        """Runs, reports and events that threads write at the same time all arrive."""
        threads, each = 4, 4

        def write(thread: int) -> None:
            for unit in range(1, each + 1):
                ledger.save_trial(trial_record(thread, units=unit))
                ledger.save_trial(trial_record(threads, host=str(thread)))
                ledger.add_report(report(unit, float(unit), number=thread))
                ledger.add_event(event("report", number=thread))

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(write, range(threads)))
        assert [record.units for record in ledger.load_trials(STUDY)] == [each] * threads + [0]
        curves = ledger.load_curves(STUDY)
        assert [curves[number].units for number in range(threads)] == [each] * threads
        assert len(ledger.load_events(STUDY)) == threads * each

    @_PROPERTY
    @given(done=st.lists(operations, max_size=20))
    def test_any_operations_have_the_answers_of_the_memory_ledger(
        self, ledger: Ledger, done: list[Operation]
    ) -> None:
        """After any operations in any order this ledger agrees with the in-memory one."""
        study = f"property {next(_STUDIES)}"
        base, twin = ledger.last_epoch(), MemoryLedger()
        for operation in done:
            answer = apply(ledger, study, base, operation)
            assert answer == apply(twin, study, 0, operation)
            assert ledger.last_epoch() == base + twin.last_epoch()
        assert content(ledger, study) == content(twin, study)
        assert leases(ledger, study, base) == leases(twin, study, 0)

    @_PROPERTY
    @given(offsets=st.lists(st.integers(-3, 3), max_size=10))
    def test_epochs_only_grow(self, ledger: Ledger, offsets: list[int]) -> None:
        """For any attempted epochs, those in the ledger ascend, and the last is the highest."""
        study = f"property {next(_STUDIES)}"
        expected = []
        for offset in offsets:
            last = ledger.last_epoch()
            if offset > 0:
                ledger.commit_lease(lease(last + offset, study=study))
                expected.append(last + offset)
            else:
                with pytest.raises(StaleEpochError):
                    ledger.commit_lease(lease(last + offset, study=study))
            assert ledger.last_epoch() == max(last, last + offset)
        assert [held.epoch for held in ledger.load_leases(study)] == expected

    def test_a_reopened_ledger_has_everything(
        self, ledger: Ledger, reopen: Callable[[], Ledger]
    ) -> None:
        """All records are there after a close, in another handle."""
        ledger.save_trial(trial_record(0, state="stored"))
        ledger.add_report(report(1, math.nan))
        ledger.commit_lease(lease(4))
        ledger.save_checkpoint(checkpoint("/a"))
        ledger.save_memory(STUDY, {"a": 1})
        ledger.add_event(event("stored"))
        before = content(ledger, STUDY)
        ledger.close()
        again = reopen()
        assert content(again, STUDY) == before
        assert again.load_leases() == [lease(4)]
        assert again.last_epoch() == 4

    def test_a_write_is_visible_to_another_handle_at_once(
        self, ledger: Ledger, reopen: Callable[[], Ledger]
    ) -> None:
        """A method that has returned has written: another handle sees it, both ways."""
        other = reopen()
        for writer, reader in ((ledger, other), (other, ledger)):
            epoch = writer.last_epoch() + 1
            writer.save_trial(trial_record(0, units=epoch))
            writer.commit_lease(lease(epoch))
            writer.end_lease(epoch, 2.0)
            assert reader.load_trials(STUDY) == [trial_record(0, units=epoch)]
            assert reader.load_leases()[-1] == lease(epoch, ended=2.0)

    def test_two_handles_cannot_hold_one_epoch(
        self, ledger: Ledger, reopen: Callable[[], Ledger]
    ) -> None:
        """A broker that lost the race gets the error from the ledger, not from its own memory."""
        other = reopen()
        epoch = ledger.last_epoch() + 1
        assert other.last_epoch() + 1 == epoch
        other.commit_lease(lease(epoch, host="winner"))
        with pytest.raises(StaleEpochError):
            ledger.commit_lease(lease(epoch, host="loser"))
        assert [held.host for held in ledger.load_leases()] == ["winner"]

    def test_closing_one_handle_leaves_the_other(
        self, ledger: Ledger, reopen: Callable[[], Ledger]
    ) -> None:
        """A close ends the connections of that handle alone."""
        reopen().close()
        ledger.save_trial(trial_record(0))
        assert ledger.load_trials(STUDY) == [trial_record(0)]
