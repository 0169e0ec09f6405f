"""Reader of studies that clients open: their policies, and what their ledgers know."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from optuna_hermes.broker._protocol import OpenStudy, Reattach, Register, StudySpec
from optuna_hermes.broker._server._ledgers import Ledgers, in_parts, is_shared, study_facts
from optuna_hermes.broker._server._policy_modules import try_policy
from optuna_hermes.errors import LedgerError
from optuna_hermes.model import Curve

if TYPE_CHECKING:
    from optuna_hermes.broker._core._event_handler import EventHandler


class LedgerReader:
    """Reads studies before the broker serves them."""

    def __init__(self, handler: EventHandler, ledgers: Ledgers) -> None:
        self._handler = handler
        self._ledgers = ledgers
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._accepted: set[tuple[int, str]] = set()
        """Processes, and the policies that they had here."""

    @property
    def reading(self) -> set[str]:
        """The keys of the studies that are being read."""
        return set(self._locks)

    def is_served(self, key: str) -> bool:
        """True if the state has all of the study."""
        study = self._handler.state.studies.get(key)
        return study is not None and study.has_processes

    async def read(self, message: OpenStudy | Register | Reattach, pid: int) -> dict[str, Any]:
        """Return what ``StudyRead`` takes of a study's ledger; nothing if the study is served.

        ``pid`` is the client's process.

        Raises:
            HermesError: its policy cannot be used, its ledger not be read, or a copy is served.
        """
        spec = message.study
        # After a restart all clients of a study come at once: the first one's answer is for all.
        lock = self._locks.setdefault(spec.key, asyncio.Lock())
        async with lock:
            known = await self._read(spec)
        # Only a driver changes the policy of a study that is served: the user may be editing its
        # file, and it may take long to run.
        if known or isinstance(message, OpenStudy):
            # Who goes on keeps the modules of the policy that it began with, as its own ones.
            try_policy(spec.policy, spec.folders, again=(pid, spec.policy) in self._accepted)
            self._accepted.add((pid, spec.policy))
        return known

    async def _read(self, spec: StudySpec) -> dict[str, Any]:
        while not self.is_served(spec.key):
            count = self._ledgers.n_written(spec.key)
            read = partial(self._ledgers.read, spec.key, spec.ledger_url)
            shared = await asyncio.wrap_future(read(is_shared))
            presence = self._handler.presence(time.monotonic()) if shared else None
            known = await asyncio.wrap_future(read(partial(study_facts, spec.key, presence)))
            curves: dict[int, Curve] = {}
            for numbers in in_parts(known["trials"]):
                ask = methodcaller("load_curves", spec.key, numbers)
                curves |= await asyncio.wrap_future(read(ask))
            known["curves"] = curves
            # Again if it was written to meanwhile.
            if count == self._ledgers.n_written(spec.key):
                return known
        self._refuse_copy(spec)
        return {}

    def _refuse_copy(self, spec: StudySpec) -> None:
        from optuna_hermes.ledger import is_other_file  # with SQLAlchemy, which is there by now

        served = self._handler.state.studies[spec.key].spec
        if is_other_file(spec.ledger_url, served.ledger_url):
            raise LedgerError(
                f"A broker tells studies apart by their keys, and {spec.ledger_url} has that of "
                f"study {served.name!r}, which it serves in {served.ledger_url}: train a copy once "
                "that has ended. If the file was moved, run `optuna-hermes broker --stop` first."
            )
