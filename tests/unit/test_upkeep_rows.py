"""Rows that ``gc`` removes from the ledger, and rows that it keeps."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from optuna_hermes import _optuna, upkeep
from optuna_hermes._optuna_tables import key_attribute
from optuna_hermes.ledger import (
    CheckpointRecord,
    EventRecord,
    LeaseRecord,
    Ledger,
    ReportRecord,
    TrialRecord,
    open_ledger,
)
from optuna_hermes.ledger._records import HostRecord
from optuna_hermes.model import Checkpoint
from optuna_hermes.suspend._tiers import _remote
from optuna_hermes.upkeep._rows import EVENT_LOG_SECONDS, FORGET_HOST_SECONDS
from support.records import locked

NOTHING = upkeep.Litter(files={}, rows=())
NOW = 1_000_000_000.0
OLD = NOW - EVENT_LOG_SECONDS - 1.0


class House:
    """A study with its ledger."""

    def __init__(self, url: str) -> None:
        self.study = optuna.create_study(storage=url, study_name="study")
        self.key = _optuna.study_key(self.study)
        self.ledger = open_ledger(_optuna.ledger_url(self.study))

    def trial(self, *, finished: bool) -> int:
        """A trial with its trial; what Optuna says of its end counts, not the ledger."""
        trial = _optuna.open_trial(self.study)
        self.ledger.save_trial(
            TrialRecord(study=self.key, number=trial.number, trial_id=0, state="stored")
        )
        if finished:
            self.study.tell(trial.number, 1.0)
        return trial.number

    def lease(self, epoch: int, *, host: str = "here", started: float = NOW - 61.0) -> None:
        """A lease that is out."""
        self.ledger.commit_lease(
            LeaseRecord(
                study=self.key,
                epoch=epoch,
                number=0,
                devices=(f"{host}/cpu:0",),
                host=host,
                started=started,
            )
        )

    def checkpoints(self, key: str, *paths: str) -> None:
        """Rows of a study's checkpoints."""
        for path in paths:
            checkpoint = Checkpoint(path=path, units=1, size_bytes=4, sha256="")
            self.ledger.save_checkpoint(
                CheckpointRecord(study=key, number=0, checkpoint=checkpoint, at=OLD)
            )

    def event(self, number: int | None, at: float) -> None:
        """A line of an event log."""
        self.ledger.add_event(EventRecord(study=self.key, number=number, kind="granted", at=at))

    def rows(self, *, host: str | None = "here", serving: Collection[str] = ()) -> upkeep.Rows:
        """Find the rows that may go."""
        return upkeep.find_rows(self.study, self.ledger, host=host, serving=serving, now=NOW)

    def clear(self, rows: upkeep.Rows) -> None:
        """Let it go."""
        upkeep.remove_rows(self.study, self.ledger, rows)


@pytest.fixture
def house(storage_url: str) -> Iterator[House]:
    house = House(storage_url)
    yield house
    house.ledger.close()


def test_a_lease_of_a_host_without_a_broker_ends(house: House) -> None:
    """Nobody on this host holds it any more; a dry run changes nothing.

    It ends at its trial's last report: nobody knows what came after.
    """
    house.lease(1)
    at = NOW - 20.0
    report = ReportRecord(
        study=house.key, number=0, unit=1, step=1, value=0.5, device_seconds=1.0, at=at
    )
    house.ledger.add_report(report)
    rows = house.rows()
    assert rows.leases == (1,)
    assert house.ledger.load_leases()[0].ended is None
    house.clear(rows)
    assert house.ledger.load_leases()[0].ended == at
    assert house.rows().leases == ()


def test_leases_that_may_be_held_stay(house: House, tmp_path: Path) -> None:
    """Of a study that is served or locked, of another host, and those granted a moment ago."""
    house.lease(1, host="elsewhere")
    house.lease(2, started=NOW - 59.0)
    assert house.rows().leases == ()
    house.lease(3)
    assert house.rows(serving=[house.key]).leases == ()
    with locked(tmp_path / "study.db", house.key):  # by a broker of another runtime directory
        assert house.rows().leases == ()
    assert house.rows(host=None).leases == ()
    assert house.rows().leases == (3,)


def test_a_lease_of_a_former_name_of_this_host_ends(house: House) -> None:
    """A container has another name after each start, and a file has one broker at a time."""
    house.lease(1, host="former", started=NOW - FORGET_HOST_SECONDS - 1.0)
    assert house.rows(host=None).leases == ()
    assert house.rows().leases == (1,)


def test_a_lease_of_a_broker_that_beats_is_its_own(house: House) -> None:
    """A lease ends with its broker where brokers share studies, not with a look at this host."""
    house.ledger.beat(HostRecord(name="here", instance="i"))
    trial = TrialRecord(study=house.key, number=0, trial_id=0, state="running", owner="i")
    house.ledger.save_trial(trial)
    house.ledger.commit_lease(
        LeaseRecord(
            study=house.key,
            epoch=1,
            number=0,
            devices=("here/cpu:0",),
            host="here",
            started=0.0,
            owner="i",
        )
    )
    assert house.rows().leases == ()


def test_brokers_that_are_silent_for_long_are_forgotten(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that beats stays; one that has not for too long is forgotten, and its leases end."""
    house.ledger.beat(HostRecord(name="far", instance="i"))
    assert house.rows().hosts == ()
    monkeypatch.setattr("optuna_hermes.upkeep._rows.FORGET_HOST_SECONDS", -1.0)
    rows = house.rows()
    assert rows.hosts == ("i",)
    house.clear(rows)
    assert house.ledger.load_hosts() == []


def test_a_broker_that_has_just_come_back_stays(house: House) -> None:
    """Between the look and the clearing it may beat again: then it is not forgotten."""
    house.ledger.beat(HostRecord(name="far", instance="i"))
    rows = upkeep.Rows(leases=(), hosts=("i",), studies=(), events=0, events_before=0.0)
    house.clear(rows)
    assert [host.instance for host in house.ledger.load_hosts()] == ["i"]
    assert FORGET_HOST_SECONDS > 600


def test_a_study_that_optuna_has_no_more_is_forgotten(house: House) -> None:
    """A deleted study goes; this one, others in the storage and served ones stay."""
    kept = optuna.create_study(storage=house.study._storage, study_name="kept")
    for key in ("deleted", "served", _optuna.study_key(kept), house.key):
        house.ledger.save_trial(TrialRecord(study=key, number=0, trial_id=0, state="stored"))
    rows = house.rows(serving=["served"])
    assert rows.studies == ("deleted",)
    house.clear(rows)
    assert "deleted" not in house.ledger.load_studies()
    assert house.key in house.ledger.load_studies()


def test_a_study_that_was_beginning_when_gc_looked_is_kept(house: House) -> None:
    """Its key is in the ledger before it is in Optuna's table, and gc may look in between."""
    house.ledger.add_study("fresh")
    rows = house.rows()
    assert rows.studies == ("fresh",)
    begun = optuna.create_study(storage=house.study._storage, study_name="begun")
    name = key_attribute(begun._study_id)
    house.study._storage.set_study_system_attr(begun._study_id, name, "fresh")
    house.clear(rows)
    assert _optuna.known_key(begun) == "fresh"


def test_a_study_of_another_storage_is_not_taken_for_deleted(house: House, tmp_path: Path) -> None:
    """As one in a journal whose ledger is in this database."""
    storage = JournalStorage(JournalFileBackend(str(tmp_path / "journal.log")))
    key = _optuna.study_key(optuna.create_study(storage=storage))
    house.ledger.save_trial(TrialRecord(study=key, number=0, trial_id=0, state="stored"))
    assert house.rows().studies == ()


def test_old_events_of_finished_trials_go(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are counted, by the database, and removed when it is meant; younger ones stay."""
    number = house.trial(finished=True)
    house.event(number, OLD)
    house.event(None, OLD)
    house.event(number, NOW)
    with monkeypatch.context() as long:
        # The log of a long study is not read for that.
        long.delattr(Ledger, "load_events")
        rows = house.rows()
    assert rows.events == 2
    assert len(house.ledger.load_events(house.key)) == 3
    house.clear(rows)
    assert [event.at for event in house.ledger.load_events(house.key)] == [NOW]


def test_the_event_log_of_an_unfinished_trial_stays_whole(house: House) -> None:
    """However old it is, nothing since its first event goes."""
    finished, suspended = house.trial(finished=True), house.trial(finished=False)
    house.event(finished, OLD - 9.0)
    house.event(suspended, OLD - 5.0)
    house.event(finished, OLD - 1.0)
    house.event(suspended, NOW)
    rows = house.rows()
    assert rows.events == 1
    house.clear(rows)
    assert [event.at for event in house.ledger.load_events(house.key, suspended)] == [
        OLD - 5.0,
        NOW,
    ]


def test_a_study_without_a_database_is_not_deleted(tmp_path: Path) -> None:
    """The ledger of a storage without one is the study's alone: others are none of its business."""
    study = optuna.create_study(storage=optuna.storages.InMemoryStorage())
    ledger = open_ledger(f"sqlite:///{tmp_path}/ledger.db")
    ledger.save_trial(TrialRecord(study="other", number=0, trial_id=0, state="stored"))
    assert upkeep.find_rows(study, ledger, host="h", serving=(), now=NOW).studies == ()
    ledger.close()


def test_files_of_deleted_studies_go_with_them(house: House, tmp_path: Path) -> None:
    """Their checkpoints are litter; what their trials printed stays."""
    folder = checkpoint_of(tmp_path / "here" / "deleted")
    keys = ["deleted", "not there"]
    litter, gone = upkeep.with_deleted(NOTHING, house.ledger, keys, [tmp_path / "here"])
    assert litter.files == {folder / "000001-unit-1.safetensors": 4}
    assert gone == ("deleted", "not there")


def test_a_deleted_study_is_not_forgotten_while_checkpoints_are_elsewhere(
    house: House, tmp_path: Path
) -> None:
    """They are litter once their folder or their store is named too."""
    store = f"file://{tmp_path}/bucket"
    place = f"{store}/deleted/trial-00000/000001-unit-1-abc.safetensors"
    source = tmp_path / "source"
    source.write_bytes(b"0123")
    _remote.put(source, place)
    folder = checkpoint_of(tmp_path / "there" / "deleted")
    gone_since = folder.with_name("trial-00001") / "000001-unit-1.safetensors"
    house.checkpoints("deleted", place, str(folder / "000001-unit-1.safetensors"), str(gone_since))
    here = tmp_path / "here"
    litter, gone = upkeep.with_deleted(NOTHING, house.ledger, ["deleted"], [here])
    assert (litter.size_bytes, gone) == (0, ())
    assert litter.elsewhere == tuple(sorted([store, str(tmp_path / "there")]))
    litter, gone = upkeep.with_deleted(
        NOTHING, house.ledger, ["deleted"], [here, tmp_path / "there"], [store]
    )
    assert litter.files == {place: 4, folder / "000001-unit-1.safetensors": 4}
    assert (litter.elsewhere, gone) == ((), ("deleted",))


@pytest.mark.parametrize("is_there", [False, True])
def test_a_deleted_study_is_not_forgotten_while_its_folder_may_be_elsewhere(
    is_there: bool, house: House, tmp_path: Path
) -> None:
    """It may be another host's, or not be mounted; nobody would find its files without the rows."""
    far = tmp_path / "far"
    house.checkpoints("deleted", str(far / "deleted" / "trial-00000" / "000001-unit-1.safetensors"))
    if is_there:
        far.mkdir()  # what was in it is gone, but a place that is not searched says nothing
    litter, gone = upkeep.with_deleted(NOTHING, house.ledger, ["deleted"], [tmp_path])
    assert (litter.elsewhere, gone) == ((str(far),), ())
    litter, gone = upkeep.with_deleted(NOTHING, house.ledger, ["deleted"], [far])
    assert (litter.elsewhere, gone) == (((), ("deleted",)) if is_there else ((str(far),), ()))


def test_a_deleted_study_of_two_hosts_is_forgotten_once_each_has_cleared_its_own(
    house: House, tmp_path: Path
) -> None:
    """No host sees the other one's folder, so each takes its own files out of the ledger."""
    folders = [checkpoint_of(tmp_path / host / "deleted") for host in ("first", "second")]
    house.checkpoints("deleted", *(str(folder / "000001-unit-1.safetensors") for folder in folders))

    def clear(host: str) -> tuple[str, ...]:
        there = tmp_path / host
        litter, gone = upkeep.with_deleted(NOTHING, house.ledger, ["deleted"], [there])
        upkeep.remove(house.study, house.ledger, litter)
        return gone

    assert clear("first") == ()
    (row,) = house.ledger.load_checkpoints("deleted")
    assert row.checkpoint.path == str(folders[1] / "000001-unit-1.safetensors")
    assert clear("second") == ("deleted",)
    assert [(folder / "000001-unit-1.safetensors").exists() for folder in folders] == [False, False]


def test_a_link_that_leads_nowhere_is_no_folder_that_is_gone(house: House, tmp_path: Path) -> None:
    """The study's folder may be on a disk that is not mounted."""
    here = tmp_path / "here"
    here.mkdir()
    (here / "deleted").symlink_to(tmp_path / "not mounted" / "deleted")
    house.checkpoints(
        "deleted", str(here / "deleted" / "trial-00000" / "000001-unit-1.safetensors")
    )
    litter, gone = upkeep.with_deleted(NOTHING, house.ledger, ["deleted"], [here])
    assert (litter.elsewhere, gone) == ((str(here),), ())


def test_an_odd_path_of_a_checkpoint_is_no_error(house: House, tmp_path: Path) -> None:
    """Whoever writes to the database decides what stands there."""
    house.checkpoints("deleted", "000001-unit-1.safetensors")
    _, gone = upkeep.with_deleted(NOTHING, house.ledger, ["deleted"], [tmp_path])
    assert gone == ()


@pytest.mark.parametrize("key", ["../elsewhere", "..", ".", "", "link"])
def test_a_key_that_leads_elsewhere_has_no_files(key: str, house: House, tmp_path: Path) -> None:
    """Whatever the ledger holds as a key, nothing outside of the folder of studies goes."""
    for place in ("elsewhere", "here", ".", "here/other"):
        checkpoint_of(tmp_path / place)
    (tmp_path / "here" / "link").symlink_to(tmp_path / "elsewhere")
    bucket = [f"file://{tmp_path}/here"] if key != "link" else []
    litter, _ = upkeep.with_deleted(NOTHING, house.ledger, [key], [tmp_path / "here"], bucket)
    assert litter.files == {}


def checkpoint_of(study: Path) -> Path:
    folder = study / "trial-00000"
    folder.mkdir(parents=True)
    for name in ("000001-unit-1.safetensors", "output.log"):
        (folder / name).write_bytes(b"0123")
    return folder
