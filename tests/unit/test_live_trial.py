"""The transitions of a trial's state."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import get_args

import pytest

import optuna_hermes.broker._core
from optuna_hermes.broker._core._broker_state import Lease
from optuna_hermes.broker._core._live_trial import TRANSITIONS, LiveTrial
from optuna_hermes.broker._protocol import TierChanged
from optuna_hermes.model import TrialStatus

LEASE = Lease(
    epoch=3,
    study="s",
    number=0,
    devices=("cpu:0", "cpu:1"),
    connection=7,
    started=0.0,
    slice_started=0.0,
    deadline=9.0,
    from_tier="resident",
    previous_epoch=2,
)
CALLS = {
    "register": lambda trial: trial.register(7, 1.0),
    "start": lambda trial: trial.start(LEASE, "h"),
    "park": lambda trial: trial.park(TierChanged(epoch=3, tier="host", suspend_seconds=0.0)),
    "leave_process": lambda trial: trial.leave_process(),
    "undo_start": lambda trial: trial.undo_start(LEASE, 1.0, left=False),
    "come_back": lambda trial: trial.come_back(7, 3, ("cpu:0",), 1.0),
    "end": lambda trial: trial.end("failed"),
}


@pytest.mark.parametrize(("name", "state"), [*product(TRANSITIONS, get_args(TrialStatus))])
def test_a_transition_is_made_from_the_states_of_the_table_only(
    name: str, state: TrialStatus
) -> None:
    """Each method leads where the table says, and refuses a state that is not there."""
    trial = LiveTrial(study="s", number=0, trial_id=0, state=state, submitted=0.0)
    before, after = TRANSITIONS[name]
    if state in before:
        CALLS[name](trial)
        assert trial.state in after
    else:
        with pytest.raises(ValueError, match=f"{name} takes .* but trial 0 is {state}"):
            CALLS[name](trial)
        assert trial.state == state


def test_a_trial_that_is_over_has_no_process() -> None:
    """The end of a trial takes with it all that is known of its process."""
    trial = LiveTrial(study="s", number=0, trial_id=0, state="pending", submitted=0.0)
    trial.start(LEASE, "h")
    assert (trial.connection, trial.devices, trial.epoch) == (7, ("cpu:0", "cpu:1"), 3)
    trial.end("done")
    assert (trial.connection, trial.devices, trial.requested_tier, trial.tier) == (
        None,
        (),
        None,
        None,
    )


def test_no_other_module_assigns_the_state() -> None:
    """All of the broker's decisions change a trial's state by its transitions."""
    (folder,) = optuna_hermes.broker._core.__path__
    found = [
        path.name
        for path in Path(folder).glob("*.py")
        if re.search(r"(?<!self)\.state(, [\w., ]+)? = ", path.read_text())
    ]
    assert found == []
