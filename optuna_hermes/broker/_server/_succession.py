"""Succession of brokers: their common name, and the processes that each leaves to the next."""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

from optuna_hermes.broker import _holders
from optuna_hermes.broker._core._broker_state import BrokerState
from optuna_hermes.broker._core._events import Disconnected, Event, ProcessExpected
from optuna_hermes.broker._privacy import write_private
from optuna_hermes.broker._served_process import ServedProcess
from optuna_hermes.broker._server._outbox import proof_of_end
from optuna_hermes.broker._server._processes import watch

log = logging.getLogger("optuna_hermes.broker")


class Succession:
    """Takes over the clients of an earlier broker, and leaves its own to a later one.

    They are written down in the runtime directory.
    """

    def __init__(self, directory: Path, state: BrokerState, apply: Callable[[Event], None]) -> None:
        self._directory = directory
        self._state = state
        self._apply = apply
        self._remembered: tuple[ServedProcess, ...] = ()
        self._leaving: dict[str, ServedProcess] = {}

    def expect(self) -> None:
        """Find the processes of the broker before this one that still live."""
        self._remembered = _holders.living(self._directory)
        for number, holder in enumerate(self._remembered):
            connection = -1 - number  # of no socket, but it ends as the others do
            self._apply(ProcessExpected(connection=connection, holder=holder))
            self._watch(connection, holder)
        if self._remembered:
            log.info("waiting for %d trials of the broker before", len(self._remembered))

    def _watch(self, connection: int, holder: ServedProcess) -> None:
        def gone() -> None:
            self._apply(Disconnected(connections=(connection,)))

        end = watch(holder.pid, gone)  # where nothing can be watched it may only come back
        # Checked while it is watched: before, its process id could have gone to another process.
        if _holders.started(holder.pid) != holder.started:
            if end is not None:
                end()
            gone()

    def lease_ends(self, epochs: Collection[int]) -> None:
        """Note leases whose ends are about to be written.

        Until the ledger has an end, the process remains one that the next broker waits for: it has
        to say it again, with its last reports, if this broker dies before.
        """
        for holder in self._remembered:
            if holder.epoch in epochs:
                self._leaving[proof_of_end(holder.epoch)] = holder

    def written(self, proofs: Collection[int | str]) -> None:
        """Forget processes of which the ends of leases are in the ledger by now."""
        gone = self._leaving.keys() & proofs
        for proof in gone:
            del self._leaving[proof]
        if gone:  # the process of a plain trial lives on, and there may be no other grant
            self.remember()

    def remember(self, *, again: bool = False) -> None:
        """Save the processes that this broker serves, for the next one.

        ``again`` also where nothing has changed.
        """
        served = holders(self._state)
        left = _unserved(self._leaving.values(), served)
        served = (*left, *served)  # of two with one device the later one has it
        if served == self._remembered and not again:
            return
        try:
            _holders.save(self._directory, served)
            self._remembered = served
        except OSError as error:
            log.error(
                "the next broker will not know who has a device, so make room in %s: %s",
                self._directory,
                error,
            )


def _unserved(
    leaving: Iterable[ServedProcess], served: Collection[ServedProcess]
) -> Iterator[ServedProcess]:
    """Those that leave and are not served any more, under the same lease or with the same trial."""
    epochs = {each.epoch for each in served}
    trials = {(each.pid, each.study, each.number) for each in served}
    for each in leaving:
        if each.epoch not in epochs and (each.pid, each.study, each.number) not in trials:
            yield each


def holders(state: BrokerState) -> tuple[ServedProcess, ...]:
    """Processes that the next broker has to wait for, if this one dies now."""
    leases = {lease.epoch: lease for lease in state.leases()}
    held: list[tuple[int, int | None, str, int | None]] = [
        (trial.epoch, trial.connection, trial.study, trial.number)
        for trial in state.trials()
        if trial.connection
    ]
    held += [(e, x.connection, x.study, None) for e, x in leases.items() if x.number is None]
    found = [each.holder for each in state.recovering.values()]
    for epoch, connection, study, number in held:
        client, lease = state.client_of(connection), leases.get(epoch)
        if client is not None and epoch:
            found.append(
                ServedProcess(
                    pid=client.pid,
                    started=client.started,
                    role=client.role,
                    study=study,
                    number=number,
                    epoch=epoch,
                    devices=() if lease is None else lease.devices,
                    energy_joules=None if lease is None else lease.energy_joules,
                )
            )
    return tuple(found)


def unpowered_path(directory: Path) -> Path:
    """Path of the file in which a broker saves the devices that the next one has to wake."""
    return directory / "unpowered.json"


def instance_in(directory: Path, host: str) -> str:
    """Return the name of a directory's broker: made by the first one, kept by the next ones.

    A directory has one broker at a time, which holds its lock: so what the one before had is the
    next one's, and no broker of another directory or host ever has the name. A directory may
    have come with the copy of an image or a disk, so a new name is made where the host has
    another name, or was started again since. The host's name is in it for people who read it.

    Raises:
        OSError: the file system refuses.
    """
    with contextlib.suppress(OSError, ValueError):  # there is none, or one of another version
        name, made = (directory / "instance").read_text().split("\n", 1)
        if made == f"{host}\n{_holders.boot()}":
            return name
    name = f"{host[:64]}-{uuid.uuid4().hex[:16]}"
    save_instance(directory, host, name)
    return name


def save_instance(directory: Path, host: str, name: str) -> None:
    """Save the name of a directory's broker on this host.

    Raises:
        OSError: the file system refuses.
    """
    write_private(directory / "instance", f"{name}\n{host}\n{_holders.boot()}")
