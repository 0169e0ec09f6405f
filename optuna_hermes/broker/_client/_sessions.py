"""The sessions of this process, by trial."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optuna_hermes.broker._client._session import RunSession


class Sessions:
    """The sessions of this process, by study name and trial number.

    ``worker`` is the session of a process that serves one run at a time for ``optimize``, and
    ``importing`` says that this process imports an objective for such processes.
    """

    def __init__(self) -> None:
        self.worker: RunSession | None = None
        self.importing = False
        self._by_trial: dict[tuple[str, int], RunSession] = {}

    def add(self, study: str, number: int, session: RunSession) -> None:
        """Remember whose session this is."""
        self._by_trial[study, number] = session

    def get(self, study: str, number: int) -> RunSession | None:
        """The session of a trial, None if it has none in this process."""
        return self._by_trial.get((study, number))

    def pop(self, study: str, number: int) -> RunSession | None:
        """Forget a trial's session."""
        return self._by_trial.pop((study, number), None)


sessions = Sessions()


def session_of(trial: Any) -> RunSession | None:
    """The session of an ``optuna.Trial``, None if its study does not run under a broker."""
    study = getattr(trial, "study", None)
    return None if study is None else sessions.get(study.study_name, trial.number)
