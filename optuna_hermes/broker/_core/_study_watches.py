"""Watches of drivers on their studies: who is told of a change, and what counts as one. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from msgspec import structs

from optuna_hermes.broker._core._broker_state import BrokerState, Client, Slot
from optuna_hermes.broker._core._status import all_devices, study_status
from optuna_hermes.broker._core._study import Study
from optuna_hermes.broker._core._turn import Turn
from optuna_hermes.broker._protocol import DeviceStatus, StudyChanged, WatchStudy

Problem = Callable[[Slot], str]
"""Returns the reason not to grant a device; empty if it can be granted."""


def watch(turn: Turn, connection: int, message: WatchStudy, problem: Problem) -> None:
    """Let a driver watch its study; tell it of the present too, if it asks for that."""
    client = turn.state.clients[connection]
    client.watches = True
    if message.now:
        answer = _status(turn.state, turn.state.studies[message.study], turn.now, problem)
        client.last_status = _steady(answer)
        turn.send(connection, structs.replace(answer, is_answer=True))


def watchers(state: BrokerState) -> Iterator[tuple[int, Client, Study]]:
    """The drivers that are to be told of the next change, with their studies."""
    for study in state.studies.values():
        if study.driver is not None and state.clients[study.driver].watches:
            yield study.driver, state.clients[study.driver], study


def tell(turn: Turn, problem: Problem) -> None:
    """Tell drivers of the changes of their studies since they were told last."""
    for connection, client, study in watchers(turn.state):
        status = _status(turn.state, study, turn.now, problem)
        steady = _steady(status)
        if steady != client.last_status:
            client.last_status, client.watches = steady, False
            turn.send(connection, status)


def _status(state: BrokerState, study: Study, now: float, problem: Problem) -> StudyChanged:
    return StudyChanged(
        study=study_status(study, state, now),
        devices=all_devices(state, now, problem),
        leased=sum(len(lease.devices) for lease in state.leases_of(study)),
    )


def _steady(status: StudyChanged) -> StudyChanged:
    """A status without what changes by itself as time goes on: the driver counts that up."""
    study = status.study
    return structs.replace(
        status,
        study=structs.replace(
            study,
            outage_seconds=None if study.outage_seconds is None else 0.0,
            device_seconds=0.0,
            watt_hours=None,
            held_seconds=0.0,
            spent_seconds=0.0,
        ),
        devices=tuple(map(_steady_device, status.devices)),
    )


def _steady_device(device: DeviceStatus) -> DeviceStatus:
    holder = device.holder
    if holder is not None:
        # Nor the slice: a driver neither shows nor steers by when it ends.
        holder = structs.replace(holder, since_seconds=0.0, left_seconds=0.0, slice_seconds=0.0)
    return structs.replace(device, memory_free_bytes=None, energy_joules=None, holder=holder)
