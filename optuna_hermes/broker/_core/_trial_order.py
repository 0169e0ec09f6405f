"""Order in which a policy wants trials, if only they wanted a device. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from optuna_hermes.model import Decision, Snapshot, TrialView, Unstarted

MOST_ASKED = 16
"""Most trials that a policy is asked about: those that trained last."""


def wanted_first(
    decide: Callable[[Snapshot], Decision], snapshot: Snapshot, numbers: Collection[int]
) -> list[int]:
    """Order in which a policy would give a device to these trials, if only they wanted one.

    It is asked about one device and them, again and again without those it has chosen. What it
    leaves open goes by when they ran: the latest is wanted first. Its memory is not touched.
    Every other trial is shown to it as running, but not on that device, and every other device as
    it is.
    """
    # None but the host's own: a policy may look up what it knows of each.
    first, *rest = snapshot.devices
    devices = (replace(first, free=True, healthy=True, powered=True), *rest)
    trials = [_waiting(trial, snapshot.now) for trial in snapshot.trials if trial.number in numbers]
    recent = sorted(
        trials, key=lambda trial: (trial.waiting_since or 0.0, trial.number), reverse=True
    )
    others = [_busy(trial, first.id) for trial in snapshot.trials if trial.number not in numbers]
    asked = {trial.number: trial for trial in recent[:MOST_ASKED]}
    others += [_busy(trial, first.id) for trial in recent[MOST_ASKED:]]
    order: list[int] = []
    while len(asked) > 1:
        decision = decide(
            replace(
                snapshot,
                devices=devices,
                trials=(*others, *asked.values()),
                unstarted=Unstarted(count=0, fixed=snapshot.unstarted.fixed),
            )
        )
        chosen = next((a.trial for a in decision.assignments if a.trial in asked), None)
        if chosen is None:
            break
        others.append(_busy(asked.pop(chosen), first.id))
        order.append(chosen)
    return order + [trial.number for trial in recent if trial.number not in order]


def _waiting(trial: TrialView, now: float) -> TrialView:
    since = now if trial.waiting_since is None else trial.waiting_since
    elastic = None if trial.elastic is None else replace(trial.elastic, devices=(1, 1))
    return replace(
        trial,
        state="parked",
        waiting_since=since,
        device=None,
        devices=(),
        bound_to=(),
        devices_wanted=1,
        elastic=elastic,
    )


def _busy(trial: TrialView, free: str) -> TrialView:
    on = tuple(each for each in trial.current_devices if each != free)
    return replace(
        trial,
        state="running",
        waiting_since=None,
        device=on[0] if on else None,
        devices=on if len(on) > 1 else (),
    )
