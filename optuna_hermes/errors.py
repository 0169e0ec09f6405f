"""Errors as one tree: each message says the rule, the value, and what to do."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from enum import IntEnum


class ExitStatus(IntEnum):
    """Exit statuses of ``optuna-hermes``, for shells and managers."""

    DONE = 0
    FAILED = 1
    """A failure that is not the caller's."""
    BAD_INPUT = 2
    NOTHING_SUCCEEDED = 3
    """Every trial of a study has failed, or so many alike that it was stopped."""
    SUSPENDED = 75
    """``EX_TEMPFAIL``: a signal, the end of the job, or a database or checkpoints that were away
    for long, suspended all, or let nothing begin; run the same command again.
    """
    INTERRUPTED = 130
    """Ctrl-C, as shells report it."""


def causes_of(error: BaseException, *, contexts: bool = False) -> Iterator[BaseException]:
    """The error, its cause, the cause of that, and so on, each once.

    Args:
        contexts: True to go on with the error in whose handling it was raised, for want of a cause.
    """
    each: BaseException | None = error
    seen = set[int]()
    while each is not None and id(each) not in seen:  # `raise error from error` makes a circle
        yield each
        seen.add(id(each))
        each = each.__cause__ or (each.__context__ if contexts else None)


def first_line(error: BaseException, text: str = "") -> str:
    """The first line of an error's text, or of ``text`` in its place; else its class."""
    return next(iter((text or str(error)).strip().splitlines()), type(error).__name__)


def sentence(error: BaseException, text: str = "") -> str:
    """``first_line`` with one full stop at its end."""
    return first_line(error, text).rstrip(".") + "."


def refuse_undecoded(text: str, what: str) -> None:
    """Refuse what neither a database nor a protocol can hold: Python could not decode it.

    Raises:
        InvalidInputError: it is such a text; ``what`` names it.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidInputError(
            f"{what} must be text in the locale's encoding but got {text!r}: set PYTHONUTF8=1 if "
            "it is UTF-8."
        ) from None


def require(holds: bool, rule: str, given: object, advice: str) -> None:
    """Refuse what somebody has given.

    Raises:
        InvalidInputError: it does not hold; the message is the rule, what was given, the advice.
    """
    if not holds:
        raise InvalidInputError(f"{rule} but got {given!r}: {advice}.")


def no_process(error: Exception) -> HermesError:
    """The error where the system refuses to start a process, or a thread."""
    number = error.errno if isinstance(error, OSError) else errno.EAGAIN
    if number in (errno.EMFILE, errno.ENFILE):
        advice = "raise the limit of open files"
    elif number in (errno.EAGAIN, errno.ENOMEM):
        advice = "raise the limit of processes or of memory"
    else:  # the interpreter was removed meanwhile, say
        advice = "see to that"
    return HermesError(
        f"The system starts no process ({error}): {advice}, then run the same command again."
    )


class HermesError(Exception):
    """Base of every error this package raises on purpose."""


class InvalidInputError(HermesError, ValueError):
    """The caller asked for something that does not exist or cannot be: exit status 2."""


class VersionError(HermesError, ImportError):
    """A library is installed in a version that is not supported."""


class UnknownPolicyError(InvalidInputError):
    """No policy has this name."""


class DeviceSpecError(InvalidInputError):
    """A ``--devices`` text that names no device, or one this host does not have."""


class ObjectiveError(InvalidInputError):
    """The objective cannot be loaded, or cannot be run under this package."""


class TrialsFailedError(HermesError, RuntimeError):
    """No trial of a study has succeeded, and none will: exit status 3."""


class StorageError(InvalidInputError):
    """The study's storage, or the study in it, cannot be opened."""


class StudyDeletedError(StorageError):
    """The study was deleted while it ran, and perhaps made again under its name."""


class DatabaseOutageError(HermesError, RuntimeError):
    """The database did not answer for long: all is suspended, or nothing was begun; status 75."""


class MonitorError(InvalidInputError):
    """The monitored metric was never logged, or not for all devices."""


class UnsupportedPrunerError(InvalidInputError):
    """A pruner that cannot be wrapped."""


class LedgerError(HermesError, RuntimeError):
    """The ledger refused a write, or cannot be read by this version."""


class LedgerOutageError(LedgerError):
    """The ledger's database cannot be reached, or has no room, at this moment: try again later."""


class StaleEpochError(LedgerError):
    """A lease was committed with an epoch that is not above every earlier one."""


class NotOwnerError(LedgerError):
    """A trial belongs to another broker than the one that wrote; ``number`` is its own."""

    def __init__(self, message: str, number: int) -> None:
        # Both arguments reach ``args``, without which the error could not be unpickled.
        super().__init__(message, number)
        self.number = number

    def __str__(self) -> str:
        return str(self.args[0])


class StudyFullError(LedgerError):
    """The study has, or is about to have, all the trials it shall have."""


class BrokerError(HermesError, RuntimeError):
    """The broker cannot be started, reached or trusted."""


class BrokerSilentError(BrokerError):
    """A broker runs but does not answer: it was stopped, or waits for a disk."""


class TrialTakenError(BrokerError):
    """A trial is trained by another thread or process, or has ended there."""


class BrokerConflictError(BrokerError, InvalidInputError):
    """A broker with other devices owns this host, or its socket belongs to someone else."""


class StudyTakenError(BrokerConflictError):
    """A study is optimized by another process of this host, ``pid``: wait for it."""

    def __init__(self, message: str, pid: int) -> None:
        # Both arguments reach ``args``, without which the error could not be unpickled.
        super().__init__(message, pid)
        self.pid = pid

    def __str__(self) -> str:
        return str(self.args[0])


class UnprintedError(HermesError, OSError):
    """Standard output cannot be written to; ``unread`` if that is since nobody reads it."""

    unread = False


class LaunchError(HermesError, RuntimeError):
    """An engine of hosts cannot be asked, or refuses."""


class ProtocolError(BrokerError):
    """A frame that is not of this protocol."""


class SuspendError(HermesError, RuntimeError):
    """A trial cannot be suspended in this way, or not be brought back."""


class CheckpointError(SuspendError):
    """A checkpoint cannot be written, or is missing, damaged or not of its trial."""


class CheckpointUnreachableError(CheckpointError):
    """A checkpoint cannot be read on this host at this moment; it may be whole: try again later."""


class UnstorableError(CheckpointError, InvalidInputError):
    """An objective keeps something that no checkpoint can hold."""


class UnwritableError(CheckpointError):
    """The file system takes no checkpoint now (no room, no permission); what was there is still."""


class Suspended(BaseException):
    """The trial is on disk and its process is free: unwinds the user's objective.

    A signal like ``KeyboardInterrupt``, not an error.
    """

    # A ``BaseException``: neither ``except Exception`` in the objective nor Optuna's ``catch`` may
    # take it for a failure of the trial.
