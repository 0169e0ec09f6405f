"""The ledgers a broker writes to, one for each study; what can wait is written together."""

from __future__ import annotations

from collections.abc import Sequence

from optuna_hermes.broker._events import DropCheckpoint, EndLease, NameLease, SaveMemory, Write
from optuna_hermes.errors import LedgerError
from optuna_hermes.ledger import Ledger, open_ledger
from optuna_hermes.ledger._base import (
    CheckpointRecord,
    EventRecord,
    LeaseRecord,
    ReportRecord,
    RunRecord,
)

_CAN_WAIT = (ReportRecord, EventRecord, SaveMemory)


class Ledgers:
    """Open ledgers by study.

    Reports, events and policy memory may wait for the next write that may not (a lease, a run, a
    checkpoint) or for ``flush``: one transaction costs the same for one row and for ten.
    """

    def __init__(self) -> None:
        self._by_url: dict[str, Ledger] = {}
        self._by_study: dict[str, Ledger] = {}
        self._waiting: dict[str, list[Write]] = {}

    def open(self, study: str, url: str) -> Ledger:
        """The ledger of a study.

        Raises:
            LedgerError: it cannot be opened.
        """
        if url not in self._by_url:
            self._by_url[url] = open_ledger(url)
        self._by_study[study] = self._by_url[url]
        return self._by_url[url]

    def write(self, writes: Sequence[Write]) -> None:
        """Write what may not wait, after what did; keep the rest for later.

        Raises:
            LedgerError: nothing of a study's batch was written; what can wait waits on.
        """
        urgent: list[str] = []
        for item in writes:
            self._waiting.setdefault(item.study, []).append(item)
            if not isinstance(item, _CAN_WAIT):
                urgent.append(item.study)
        for study in dict.fromkeys(urgent):
            self._flush(study)

    def flush(self) -> None:
        """Write all that waits.

        Raises:
            LedgerError: it waits on.
        """
        for study in [study for study, items in self._waiting.items() if items]:
            self._flush(study)

    def close(self) -> None:
        """Write what waits and close every ledger.

        Raises:
            LedgerError: something could not be written.
        """
        try:
            self.flush()
        finally:
            for ledger in self._by_url.values():
                ledger.close()

    def _flush(self, study: str) -> None:
        items = self._waiting.pop(study, [])
        ledger = self._by_study[study]
        try:
            with ledger.batch():
                for item in items:
                    _write(ledger, item)
        except LedgerError:
            self._waiting[study] = [item for item in items if isinstance(item, _CAN_WAIT)]
            raise


def _write(ledger: Ledger, item: Write) -> None:
    if isinstance(item, LeaseRecord):
        ledger.commit_lease(item)
    elif isinstance(item, EndLease):
        ledger.end_lease(item.epoch, item.ended)
    elif isinstance(item, NameLease):
        ledger.name_lease(item.epoch, item.number)
    elif isinstance(item, RunRecord):
        ledger.save_run(item)
    elif isinstance(item, ReportRecord):
        ledger.add_report(item)
    elif isinstance(item, CheckpointRecord):
        ledger.save_checkpoint(item)
    elif isinstance(item, DropCheckpoint):
        ledger.drop_checkpoint(item.study, item.path)
    elif isinstance(item, SaveMemory):
        ledger.save_memory(item.study, item.memory)
    else:
        ledger.add_event(item)
