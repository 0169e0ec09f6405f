"""The loop of docs/how-to-add-a-framework.md, as somebody adds a framework from the page alone."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import optuna
import pytest

from optuna_hermes import cooperative
from optuna_hermes.errors import InvalidInputError, Suspended
from optuna_hermes.testing import FakeSession

PAGE = Path(__file__).parents[2] / "docs" / "how-to-add-a-framework.md"
GENERATIONS = 6


@pytest.fixture
def shown() -> dict[str, Any]:
    """Names that the page's loop of one's own defines."""
    return defined(0)


def defined(block: int) -> dict[str, Any]:
    """Return the names that a block of the page's code defines."""
    codes = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {"__name__": "shown"}
    exec(codes[block], names)
    return names


class Ticking:
    """A loss that counts a batch of the session once in a generation."""

    def __init__(self, session: FakeSession | None) -> None:
        self._session = session
        self._calls = 0

    def __call__(self, x: Any) -> float:
        self._calls += 1
        if self._session is not None and self._calls % 33 == 0:  # 32 members, and what is reported
            self._session.tick()
        return float(((x - 1) ** 2).sum())


def train(shown: dict[str, Any], session: FakeSession | None) -> tuple[float, bytes]:
    """Train a trial; its value, and its population in the end."""
    np.random.seed(3)
    trial = optuna.create_study().ask()
    population = shown["Population"](16, 0.5)
    loop = shown["Evolution"](trial, population, session)
    value = loop.run(Ticking(session), GENERATIONS)
    return value, population.members.tobytes()


def test_a_session_whose_batches_nobody_counts_is_named(shown: dict[str, Any]) -> None:
    """Such a test would pass without a single suspension."""
    loop = shown["Evolution"](
        optuna.create_study().ask(), shown["Population"](16, 0.5), FakeSession({1: "resident"})
    )
    with pytest.warns(UserWarning, match="suspends nothing, .* call session.tick()") as told:
        loop.run(Ticking(None), GENERATIONS)
    assert len(told) == 1


def test_a_session_of_a_trial_of_no_study(shown: dict[str, Any], tmp_path: Path) -> None:
    """It takes values as they are, and its next process has its devices."""
    devices = ("cpu:0", "cpu:1")
    session = FakeSession({1: "disk"}, checkpoint_dir=tmp_path, devices=devices)
    for trial in (optuna.trial.FixedTrial({}), None):
        loop = shown["Evolution"](trial, shown["Population"](16, 0.5), session)
        try:
            value = loop.run(Ticking(session), GENERATIONS)
        except Suspended:
            session = session.again()
    assert session.reports[-1] == (GENERATIONS, GENERATIONS, value)
    assert session.devices == devices


def test_a_new_process_after_each_unit_changes_nothing(
    shown: dict[str, Any], tmp_path: Path
) -> None:
    """Stored after each generation and resumed from disk, values are the same to the bit."""
    wanted = train(shown, None)
    session = FakeSession({1: "disk"}, checkpoint_dir=tmp_path)
    processes = 1
    while True:
        try:
            got = train(shown, session)
            break
        except Suspended:
            session = session.again({1: "disk"})
            processes += 1
    assert got == wanted
    assert processes == GENERATIONS


def test_waiting_in_memory_changes_nothing(shown: dict[str, Any], tmp_path: Path) -> None:
    """The random numbers that others draw while the trial waits are not seen by it."""
    wanted = train(shown, None)
    session = FakeSession(
        {2: "resident", 4: "host"},
        checkpoint_dir=tmp_path,
        while_parked=lambda: np.random.seed(99),
    )
    assert train(shown, session) == wanted
    assert session.parks == ["resident", "host"]


@pytest.mark.parametrize(
    ("seconds", "saved"),
    [(1.0, [1, 2, 5, 8, 11]), (0.05, list(range(1, 12)))],
    ids=["long", "short"],
)
def test_what_takes_long_to_save_is_saved_less_often(
    shown: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
    saved: list[int],
) -> None:
    """The training stands still for a tenth of the time at most, once that is known."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(cooperative, "time", SimpleNamespace(monotonic=lambda: clock.now))

    class Slow(shown["Evolution"]):  # type: ignore[misc]
        def position(self) -> dict[str, Any]:
            clock.now += seconds
            return dict(super().position())

    def loss(x: Any) -> float:
        clock.now += 4.0 / 33  # the calls in a generation
        return float((x**2).sum())

    session = FakeSession(checkpoint_dir=tmp_path)
    population = shown["Population"](16, 0.5)
    Slow(optuna.create_study().ask(), population, session).run(loss, 12)
    assert [each.units for each in session.states] == saved


def test_shapes_are_compared_only_where_a_trial_can_be_stored(
    shown: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within an epoch a save may be due at each batch, and not be possible at any."""
    loop = cooperative.CooperativeLoop
    monkeypatch.setattr(loop, "can_store_here", lambda self: False)
    monkeypatch.setattr(loop, "_has_changed_shape", lambda self: pytest.fail("it is compared"))
    session = FakeSession({2: "disk"}, checkpoint_dir=tmp_path)
    assert train(shown, session) == train(shown, None)
    assert (session.parks, session.states) == (["resident"], [])


def test_a_second_loop_of_a_trial_is_refused(shown: dict[str, Any], tmp_path: Path) -> None:
    """The error names the user's own call."""
    session = FakeSession(checkpoint_dir=tmp_path)
    train(shown, session)
    with pytest.raises(InvalidInputError, match=re.escape("Evolution() must be called once")):
        train(shown, session)


def fit(session: FakeSession | None) -> bytes:
    """Train a trial by the page's callback; its weights in the end."""
    shown = defined(1)
    np.random.seed(3)

    class Model(shown["Model"]):  # type: ignore[misc]
        def step(self) -> None:
            super().step()
            if session is not None:
                session.tick()

    model = Model(0.3)
    callback = shown["HermesCallback"](optuna.create_study().ask(), _session=session)
    shown["Library"](model, callback, max_epochs=GENERATIONS).fit()
    weights: bytes = model.weights.tobytes()
    return weights


def test_a_callback_that_is_stored_after_each_epoch_changes_nothing(tmp_path: Path) -> None:
    """The library trains only the epochs that are left, with the same random numbers."""
    wanted = fit(None)
    session = FakeSession({1: "disk"}, checkpoint_dir=tmp_path)
    processes = 1
    while True:
        try:
            got = fit(session)
            break
        except Suspended:
            session = session.again({1: "disk"})
            processes += 1
    assert got == wanted
    assert processes == GENERATIONS


def test_a_callback_that_waits_in_memory_changes_nothing(tmp_path: Path) -> None:
    """The random numbers that others draw while the trial waits are not seen by it."""
    wanted = fit(None)
    session = FakeSession(
        {2: "resident", 4: "host"},
        checkpoint_dir=tmp_path,
        while_parked=lambda: np.random.seed(99),
    )
    assert fit(session) == wanted
    assert session.parks == ["resident", "host"]


def test_without_what_checkpoints_need_nothing_is_trained(
    shown: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The missing package is named before the first step, not when the trial is suspended."""
    monkeypatch.setitem(sys.modules, "safetensors", None)
    trial = optuna.create_study().ask()
    with pytest.raises(InvalidInputError, match=r"needs safetensors, .*pip install safe"):
        shown["Evolution"](
            trial, shown["Population"](16, 0.5), FakeSession(checkpoint_dir=tmp_path)
        )
    # None is ever written of a plain study's trial.
    train(shown, FakeSession())


def test_an_error_in_what_checkpoints_need_is_shown(
    shown: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is there but cannot be loaded is not taken to be missing."""
    (tmp_path / "safetensors.py").write_text("raise ImportError('no GLIBC_2.28')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "safetensors", raising=False)
    with pytest.raises(ImportError, match="GLIBC"):
        shown["Evolution"](
            optuna.create_study().ask(),
            shown["Population"](16, 0.5),
            FakeSession(checkpoint_dir=tmp_path),
        )
