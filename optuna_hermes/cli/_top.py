"""``top``: devices and trials, live, in a terminal."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

from optuna_hermes._extras import needed
from optuna_hermes.cli._status import trial_document
from optuna_hermes.cli._studies import (
    OptionalStudyName,
    facts_and_ledger,
    facts_reader,
    no_ledger,
    optional_storage,
    storage_of,
)
from optuna_hermes.cli._upkeep import close_trials
from optuna_hermes.errors import BrokerError, InvalidInputError
from optuna_hermes.view.progress import is_screen
from optuna_hermes.view.source import StudyReader
from optuna_hermes.view.tables import trial_view

if TYPE_CHECKING:
    from rich.console import RenderableType

    from optuna_hermes.broker._protocol import BrokerStatus, ChangePolicy, SetOverrides
    from optuna_hermes.view.history import Bar, StudyHistory
    from optuna_hermes.view.picture import Picture

# Between two reads of the ledger of a study that this host's broker does not serve.
REST_SECONDS = 5.0

_UNSERVED = "No broker of yours serves this study."
_READ_ONLY = "What the ledger has is shown, read-only."


def top(
    storage: Annotated[
        str | None, optional_storage("For event logs, `finish`, and what is over.")
    ] = None,
    study_name: OptionalStudyName = None,
) -> None:
    """Watch devices and trials, and overrule the policy.

    Without options it shows what this host's broker serves. A study that you name is shown also
    when no broker of yours serves it: read-only, out of its ledger. Leaving disturbs nothing. The
    same in one shot: `status`.

    \b
    Example:
      optuna-hermes top
      optuna-hermes top --storage sqlite:///study.db --study-name digits
    """
    with needed("`top` needs Textual", extra="top"):
        from optuna_hermes.view._top._app import Top
    if study_name is not None:
        with facts_and_ledger(storage_of(storage, study_name), study_name):
            # So that errors are printed before the screen is taken.
            pass
    if not (sys.stdin.isatty() and is_screen(sys.stdout)):
        raise InvalidInputError(
            "`top` needs a terminal on which it can draw: for a file, a pipe or TERM=dumb there is "
            "`optuna-hermes status`."
        )
    Top(StudySource(storage, study_name)).run()


class StudySource:
    """The ``TopSource`` of this host's broker, and of the ledger of a study if one is named.

    Event logs and ``finish`` need the storage.
    """

    def __init__(self, storage: str | None, name: str | None) -> None:
        self._storage = storage
        self._name = name
        facts = None if name is None or storage is None else facts_reader(storage, name)
        self._reader = StudyReader(facts, curves=True)
        self._named_key = ""
        self._before: Picture | None = None
        self._resting: Picture | None = None
        self._read_at = 0.0
        self._served = False
        self._in_outage = False

    def look(self, key: str) -> Picture:
        from optuna_hermes.view.picture import picture_of, picture_of_history

        broker = self._reader.status()
        if self._name is None:
            if broker is None:
                none = "No broker runs on this host: nothing trains."
                raise BrokerError(self._reader.silence or none)
        else:
            history = None if self._named_key else self._read(broker)
            broker = self._reader.apart(broker)
            study = None if broker is None else broker.study(self._named_key)
            self._in_outage = study is not None and study.outage_seconds is not None
            if broker is None or study is None:
                age = time.monotonic() - self._read_at
                # What ``past`` read while the broker served the study is not shown after it.
                resting = self._resting
                if history is None and (resting is None or self._served or age > REST_SECONDS):
                    history = self._read(broker)
                if history is not None:  # once for each reading: it takes all reports of the study
                    resting = picture_of_history(history, self._name)
                    self._resting, self._served = resting, False
                assert resting is not None
                why = f"{self._reader.silence or _UNSERVED} {_READ_ONLY}"
                return replace(resting, at=time.time(), read_only=why)
        self._served = True
        self._before = picture_of(broker, key or self._named_key, time.time(), self._before)
        return self._before

    def past(self) -> Sequence[Bar]:
        # Nothing is asked of a database that is known to be away: that may take half a minute.
        shown = self._before if self._served and not self._in_outage else None
        if self._name is None or shown is None or shown.key != self._named_key:
            return ()
        return self._read(None).bars

    def override(self, key: str, number: int, override: Literal["held", "boosted"] | None) -> None:
        from optuna_hermes.broker._protocol import SetOverrides

        self._send(SetOverrides(study=key, numbers=(number,), override=override))

    def finish(self, key: str, number: int) -> None:
        close_trials(*self._study_of(key, "`f` tells Optuna"), [number])

    def change_policy(self, key: str, policy: str) -> None:
        from optuna_hermes.broker._protocol import ChangePolicy

        self._send(ChangePolicy(study=key, policy=policy))

    def event_log(self, key: str, number: int) -> RenderableType:
        storage, name = self._study_of(key, "An event log is in the ledger")
        document, _ = trial_document(storage, name, number)
        return trial_view(document)

    def close(self) -> None:
        # A thread that waits for the broker's answer wakes up.
        self._reader.disconnect()

    def _send(self, message: SetOverrides | ChangePolicy) -> None:
        from optuna_hermes.broker import connect

        # Not by the reader's connection, which another thread uses.
        with contextlib.closing(connect("viewer")) as connection:
            connection.want(message)

    def _read(self, broker: BrokerStatus | None) -> StudyHistory:
        history = self._reader.history(broker)
        if history is None:  # it was made anew since top() has opened its ledger
            self._resting = None
            raise no_ledger(str(self._name))
        self._read_at, self._named_key = time.monotonic(), history.key
        return history

    def _study_of(self, key: str, why: str) -> tuple[str, str]:
        # Without a name the broker says which study it is: one of that name may be elsewhere, too.
        name = self._name or (self._before.study if self._before else None)
        if self._storage is None or not name:
            raise InvalidInputError(f"{why}: start `top` with --storage URL and --study-name NAME.")
        if facts_reader(self._storage, name)().key != key:
            raise InvalidInputError(f"The study {name!r} of --storage is another one.")
        return self._storage, name
