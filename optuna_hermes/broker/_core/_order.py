"""Order in which a policy wants runs. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from optuna_hermes.model import Decision, Device, RunView, Snapshot, Unstarted

MOST_ASKED = 16
"""Most runs that a policy is asked about: those that ran last."""


def wanted_first(
    decide: Callable[[Snapshot], Decision], snapshot: Snapshot, numbers: Collection[int]
) -> list[int]:
    """Order in which a policy would give a device to these runs, if only they wanted one.

    It is asked about one device and them, again and again without those it has chosen. What it
    leaves open goes by when they ran: the latest is wanted first. Its memory is not touched.

    Args:
        decide: the policy.
        snapshot: how things are; every other run is shown as running.
        numbers: the runs in question.
    """
    runs = [_waiting(run, snapshot.now) for run in snapshot.runs if run.number in numbers]
    recent = sorted(runs, key=lambda run: (run.waiting_since or 0.0, run.number), reverse=True)
    others = [_busy(run) for run in snapshot.runs if run.number not in numbers]
    asked = {run.number: run for run in recent[:MOST_ASKED]}
    others += [_busy(run) for run in recent[MOST_ASKED:]]
    order: list[int] = []
    while len(asked) > 1:
        views = (*others, *asked.values())
        decision = decide(_pretended(snapshot, views))
        chosen = next((a.run for a in decision.assignments if a.run in asked), None)
        if chosen is None:
            break
        others.append(_busy(asked.pop(chosen)))
        order.append(chosen)
    return order + [run.number for run in recent if run.number not in order]


def _pretended(snapshot: Snapshot, runs: tuple[RunView, ...]) -> Snapshot:
    return replace(
        snapshot,
        devices=(Device(id="any", free=True),),
        runs=runs,
        unstarted=Unstarted(count=0, fixed=snapshot.unstarted.fixed),
    )


def _waiting(run: RunView, now: float) -> RunView:
    since = now if run.waiting_since is None else run.waiting_since
    elastic = None if run.elastic is None else replace(run.elastic, devices=(1, 1))
    return replace(
        run,
        state="parked",
        waiting_since=since,
        device=None,
        devices=(),
        bound_to=(),
        devices_wanted=1,
        elastic=elastic,
    )


def _busy(run: RunView) -> RunView:
    return replace(run, state="running", waiting_since=None)
