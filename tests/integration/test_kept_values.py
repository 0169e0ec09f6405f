"""Objects from ``run.kept`` and modules that a loop holds stay what is stored, over a return."""

from __future__ import annotations

import functools
import io
import logging
import sys
import types
from collections import deque
from collections.abc import Callable
from datetime import date
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import optuna
import pytest
import torch
from torch import nn

from optuna_hermes.errors import CheckpointError, Suspended, UnstorableError
from optuna_hermes.pytorch import PyTorchLoop
from optuna_hermes.testing import FakeSession
from support.loops import by_way_of_disk, descend

log = logging.getLogger(__name__)
BATCHES = (0.5, 1.0, 1.5, 2.0)


def made(session: FakeSession, model: nn.Module, lr: float = 0.05) -> tuple[PyTorchLoop, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    named = {"model": model, "optimizer": optimizer}
    return PyTorchLoop(optuna.create_study().ask(), named, session), optimizer


def told(value: Any) -> Any:
    """A value with all its parts, to be compared."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: told(each) for key, each in value.items()}
    return [told(each) for each in value] if isinstance(value, list | tuple) else value


# -- parts of kept values ----------------------------------------------------------------------


class Ledger:
    """A kept object with lists and arrays in a tuple."""

    def __init__(self) -> None:
        self.parts = ([0.0], np.zeros(2), [torch.zeros(2)])


CASES: dict[str, Callable[[], Any]] = {
    "a pair of lists": lambda: ([], []),
    "a list of lists": lambda: [[], []],
    "a list of tensors": lambda: [torch.zeros(2), torch.zeros(2)],
    "a pair of tensors": lambda: (torch.zeros(2), torch.zeros(2)),
    "arrays in a tuple in a list": lambda: [(np.zeros(2), [])],
    "dictionaries in a list": lambda: [{"seen": []}, {"seen": [torch.zeros(1)]}],
    "a pair twice": lambda: [([], [1.0])] * 2,
    "an object": Ledger,
    "one list at two places": lambda: ([], {"a": []}, [[0.0]]),
}


def changeable(value: Any) -> list[Any]:
    """The lists of numbers, arrays and tensors in a value."""
    if isinstance(value, Ledger):
        value = value.parts
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, torch.Tensor | np.ndarray):
        return [value]
    own = isinstance(value, list) and all(isinstance(each, float) for each in value)
    inner = [part for each in value if not isinstance(each, float) for part in changeable(each)]
    return [value, *inner] if own else inner


def holding(session: FakeSession, make: Callable[[], Any], early: bool) -> Any:
    """A loop that changes parts of a kept value, which it got before its first epoch."""
    torch.manual_seed(1)
    model = nn.Linear(1, 1)
    run, optimizer = made(session, model)
    kept = run.kept.setdefault("it", make())
    parts, losses = changeable(kept), run.kept.setdefault("losses", [])
    for _ in run.epochs(3):
        if early:
            parts = changeable(run.kept["it"])
        for x in run.batches(BATCHES):
            descend(model(torch.tensor([x])).square().sum(), optimizer, losses, session)
            for number, each in enumerate(parts):
                if isinstance(each, list):
                    each.append(losses[-1] + number)
                else:
                    each += losses[-1] + number
        run.report(losses[-1])
    assert [id(each) for each in changeable(run.kept["it"])] == [id(each) for each in parts]
    return told(losses), told(parts)


@pytest.mark.parametrize("early", [False, True], ids=["before", "each epoch"])
@pytest.mark.parametrize("case", CASES)
def test_parts_of_kept_values_stay_those_that_the_loop_holds(
    case: str, early: bool, tmp_path: Path
) -> None:
    """Also in tuples and inner lists: what the loop adds to them is stored."""
    train = functools.partial(holding, make=CASES[case], early=early)
    assert by_way_of_disk(train, tmp_path, 2, 3) == train(FakeSession())


def growing(session: FakeSession) -> Any:
    """A loop that adds a list to a kept list in each epoch, and goes on to fill all of them."""
    model = nn.Linear(1, 1)
    run, optimizer = made(session, model)
    history = run.kept.setdefault("history", [([], {0.5})])
    first, losses = history[0][0], run.kept.setdefault("losses", [])
    for epoch in run.epochs(4):
        history.append(([float(epoch)], {0.5}))
        own = history[-1][0]
        for x in run.batches(BATCHES):
            descend(model(torch.tensor([x])).square().sum(), optimizer, losses, session)
            first.append(x)
            own.append(x)
        run.report(0.0)
    return told(run.kept["history"]), told(first)


@pytest.mark.parametrize("stops", [(2, 3), (4, 5), (9, 1)], ids=str)
def test_a_kept_list_may_grow_by_parts(stops: tuple[int, ...], tmp_path: Path) -> None:
    """The first parts of it stay first, though it was shorter at the epoch's begin."""
    torch.manual_seed(1)
    expected = growing(FakeSession())
    assert by_way_of_disk(growing, tmp_path, *stops) == expected


def parting(session: FakeSession) -> Any:
    """A loop that keeps one list by two names at first, and gives one its own later."""
    model = nn.Linear(1, 1)
    run, optimizer = made(session, model)
    run.kept["now"] = run.kept["best"] = [0.0]
    run.kept["pair"] = {"now": run.kept["now"], "best": run.kept["best"]}
    for epoch in run.epochs(3):
        for x in run.batches(BATCHES):
            descend(model(torch.tensor([x])).square().sum(), optimizer, [], session)
            run.kept["now"].append(x)
            run.kept["pair"]["now"].append(-x)
            if epoch == 0 and run.batch == 0:
                run.kept["best"] = list(run.kept["best"])
                run.kept["pair"]["best"] = [7.0]
        run.report(0.0)
    return told(run.kept)


def test_values_that_were_one_before_the_loop_come_back_as_two(tmp_path: Path) -> None:
    """A list that is there once cannot become two."""
    torch.manual_seed(1)
    assert by_way_of_disk(parting, tmp_path, 2, 3) == parting(FakeSession())


# -- kept values that are parts of the named objects -------------------------------------------

FOLLOWING: dict[str, Callable[[nn.Module, Any], Any]] = {
    "state_dict": lambda model, optimizer: model.state_dict(),
    "dictionary": lambda model, optimizer: dict(model.state_dict()),
    "parameter": lambda model, optimizer: [model.weight],
    "buffer": lambda model, optimizer: {"seen": model.seen},
    "row": lambda model, optimizer: (model.weight.detach()[1], 1),
    "array": lambda model, optimizer: [model.weight.detach().numpy()],
    "momentum": lambda model, optimizer: optimizer.state_dict()["state"],
    "object": lambda model, optimizer: Holder(model.weight.data),
}


class Holder:
    """A kept object that holds a tensor."""

    def __init__(self, it: torch.Tensor) -> None:
        self.it = it


def total(value: Any) -> float:
    if isinstance(value, Holder):
        value = value.it
    if isinstance(value, torch.Tensor | np.ndarray):
        return float(torch.as_tensor(value).detach().sum())
    if isinstance(value, dict):
        value = list(value.values())
    return sum(map(total, value)) if isinstance(value, list | tuple) else 0.0


def following(session: FakeSession, case: str) -> list[float]:
    """A loop that keeps, after its second batch, what goes on to be trained."""
    torch.manual_seed(1)
    model = nn.Linear(3, 2)
    model.register_buffer("seen", torch.zeros(2))
    run, optimizer = made(session, model)
    losses, totals = run.kept.setdefault("losses", []), run.kept.setdefault("totals", [])
    for epoch in run.epochs(4):
        for x in run.batches(BATCHES):
            descend(model(torch.full((3,), x)).square().sum(), optimizer, losses, session)
            model.seen += losses[-1]
            if epoch == 0 and run.batch == 1:
                run.kept["it"] = FOLLOWING[case](model, optimizer)
            totals.append(total(run.kept.get("it", 0)))
        run.report(0.0)
    return [*losses, *totals]


@pytest.mark.parametrize("stops", [(3, 2), (4, 5)], ids=str)
@pytest.mark.parametrize("case", FOLLOWING)
def test_kept_weights_without_a_copy_follow_the_weights(
    case: str, stops: tuple[int, ...], tmp_path: Path
) -> None:
    """As they do without any suspension, whatever was meant."""
    train = functools.partial(following, case=case)
    assert by_way_of_disk(train, tmp_path, *stops) == train(FakeSession())


def copying(session: FakeSession) -> list[float]:
    """A loop that begins with the weights themselves, and keeps copies later."""
    torch.manual_seed(1)
    model = nn.Linear(3, 2)
    run, optimizer = made(session, model)
    run.kept["best"] = model.state_dict()
    losses, totals = run.kept.setdefault("losses", []), run.kept.setdefault("totals", [])
    for epoch in run.epochs(4):
        for x in run.batches(BATCHES):
            descend(model(torch.full((3,), x)).square().sum(), optimizer, losses, session)
            if epoch == 1 and run.batch == 2:
                run.kept["best"] = {n: each.clone() for n, each in model.state_dict().items()}
            totals.append(total(run.kept["best"]))
        run.report(0.0)
    return [*losses, *totals]


@pytest.mark.parametrize("stops", [(3, 5), (7, 1, 3)], ids=str)
def test_copies_do_not_become_the_weights(stops: tuple[int, ...], tmp_path: Path) -> None:
    """Nor are the weights set to what was kept of them."""
    assert by_way_of_disk(copying, tmp_path, *stops) == copying(FakeSession())


class Turn(NamedTuple):
    """A key of a user's own class."""

    state: int
    action: str


class Level(Enum):
    EASY = 1
    HARD = 2


def tabulating(session: FakeSession) -> Any:
    """A loop that counts by keys of many kinds, and remembers names in arrays."""
    run = PyTorchLoop(optuna.create_study().ask(), {"model": nn.Linear(1, 1)}, session)
    counts: dict[Any, int] = run.kept.setdefault("counts", {})
    places = run.kept.setdefault("places", {})
    worst = run.kept.setdefault("worst", np.array(["a.png", "b.png"]))
    parts = run.kept.setdefault("parts", [np.array([None, (1, "a")], object)])
    for epoch in run.epochs(3):
        for x in run.batches(BATCHES):
            level = Level(1 + epoch % 2)
            keys = (Turn(epoch, "left"), level, Path("a.png"), date(2026, 1, 1 + epoch), (level, 1))
            for key in keys:
                counts[key] = counts.get(key, 0) + 1
            places[epoch, (np.int64(1), "b")] = x
            worst[epoch % 2] = f"{run.batch}.png"
            parts[0][0] = (epoch, {"x": x})
            session.tick()
        run.report(0.0)
    return counts, places, worst.tolist(), parts[0].tolist()


@pytest.mark.parametrize("stops", [(2, 3), (6, 1, 4)], ids=str)
def test_keys_of_users_classes_and_arrays_of_text_come_back(
    stops: tuple[int, ...], tmp_path: Path
) -> None:
    """Also in arrays that the loop got before its first epoch."""
    assert by_way_of_disk(tabulating, tmp_path, *stops) == tabulating(FakeSession())


class Trained(nn.Module):
    """A module that has a trained tensor beside its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.other = torch.zeros(1, requires_grad=True)


def accumulating(session: FakeSession) -> Any:
    """A loop that changes tensors by hand, by the gradients of three batches each."""
    model = Trained()
    run = PyTorchLoop(optuna.create_study().ask(), {"model": model}, session)
    weight = run.kept.setdefault("weight", torch.zeros(3, requires_grad=True))
    flat = run.kept.setdefault("flat", [torch.zeros(4)])
    if len(flat) == 1:
        flat.append(flat[0].view(2, 2).requires_grad_())
    before = run.kept.setdefault("before", [])
    for _ in run.epochs(3):
        for x in run.batches(BATCHES):
            error = (x * weight + model.other * x).sum() + flat[1].sum() - x
            error.square().backward()
            if len(before) % 3 == 2:
                for each in (weight, flat[1], model.other):
                    with torch.no_grad():
                        each -= 0.01 * each.grad
                run.kept["last"], weight.grad = weight.grad, None
            before.append(told([weight, flat, model.other, run.kept.get("last")]))
            session.tick()
        run.report(0.0)
    return before


@pytest.mark.parametrize("stops", [(4, 1), (1, 3, 1)], ids=str)
def test_gradients_of_trained_tensors_come_back(stops: tuple[int, ...], tmp_path: Path) -> None:
    """Of kept ones, of those that share memory, and of those in attributes of modules."""
    assert by_way_of_disk(accumulating, tmp_path, *stops) == accumulating(FakeSession())


# -- objects of installed packages -------------------------------------------------------------

ARCADE = """
import numpy as np

class Step:
    def __init__(self, reward):
        self.reward = reward

class Walk:
    def __init__(self, **options):
        self.rng, self.dtype, self.options = np.random.default_rng(3), np.dtype("i8"), options
        self.state, self.last, self.draw = np.zeros(2), None, None

    def step(self):
        self.state += self.rng.normal(size=2)
        self.last = Step(float(self.state.sum()) + (self.last.reward if self.last else 0.0))
        return self.last.reward

class Limit:
    def __init__(self, env):
        self.env, self.steps = env, 0

    def step(self):
        self.steps += 1
        if self.steps % 5 == 0:
            self.env.state[:] = 0
        return self.env.step()

def make(**options):
    return Limit(Walk(**options))
"""


@pytest.fixture
def arcade(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A package with environments, whose classes the objective does not name."""
    module: Any = types.ModuleType("arcade")
    exec(ARCADE, vars(module))
    monkeypatch.setitem(sys.modules, "arcade", module)
    return module.make


def playing(session: FakeSession, make: Callable[[], Any], *, always: bool) -> Any:
    """A loop that steps an environment, which it makes in each process or asks for first."""
    run = PyTorchLoop(optuna.create_study().ask(), {}, session)
    if always or "env" not in run.kept:
        run.kept["env"] = make()
    env, spare = run.kept["env"], run.kept.setdefault("spare", [make()])[0]
    buffer = run.kept.setdefault("buffer", deque(maxlen=7))
    seen = run.kept.setdefault("seen", [])
    for _ in run.epochs(3):
        for x in run.batches(BATCHES):
            buffer.append((x, env.step()))
            seen.append(sum(each for _, each in buffer) + (spare.step() if x > 1 else 0.0))
            session.tick()
        run.report(seen[-1])
    assert run.kept["env"] is env
    return told(seen), env.steps, told(env.env.state)


@pytest.mark.parametrize("stops", [(2, 3), (4, 1, 5)], ids=str)
@pytest.mark.parametrize("always", [False, True], ids=["if it is not there", "always"])
def test_an_environment_of_a_package_comes_back(
    always: bool, stops: tuple[int, ...], arcade: Any, tmp_path: Path
) -> None:
    """In the object that the objective makes anew, with what it has got since."""
    train = functools.partial(playing, make=arcade, always=always)
    assert by_way_of_disk(train, tmp_path, *stops) == train(FakeSession())


def test_a_kept_object_that_is_not_made_anew_is_named(arcade: Any, tmp_path: Path) -> None:
    """The checkpoint alone makes no objects of a package that the code cannot name."""
    session = FakeSession({2: "disk"}, checkpoint_dir=tmp_path)
    with pytest.raises(Suspended):
        playing(session, arcade, always=True)
    run = PyTorchLoop(optuna.create_study().ask(), {}, session.again())
    with pytest.raises(CheckpointError, match=r"run\.kept\['env'\] is restored only where"):
        list(run.epochs(3))


def adding(session: FakeSession, make: Callable[[], Any]) -> Any:
    """A loop that keeps a second environment, and a sum that it reads before it begins."""
    run = PyTorchLoop(optuna.create_study().ask(), {}, session)
    env, total = run.kept.setdefault("env", make()), run.kept.get("total", 0.0)
    for _ in run.epochs(3):
        other = run.kept.setdefault("other", make())
        for _ in run.batches(BATCHES):
            run.kept["total"] = total = total + env.step() + other.step()
            run.kept["last"] = [other.env.last]
            session.tick()
        run.report(total)
    return total, run.kept["last"] == [other.env.last]


@pytest.mark.parametrize("stops", [(2, 3), (5, 1)], ids=str)
def test_values_beside_one_that_comes_back_with_the_loop_are_there_before(
    stops: tuple[int, ...], arcade: Any, tmp_path: Path
) -> None:
    """But for what refers to a part of it, which comes with it."""
    train = functools.partial(adding, make=arcade)
    assert by_way_of_disk(train, tmp_path, *stops) == train(FakeSession())


@pytest.mark.parametrize("late", [False, True], ids=["of functions", "after the loop began"])
def test_an_environment_that_cannot_be_kept_is_refused(
    late: bool, arcade: Any, tmp_path: Path
) -> None:
    """At the first unit, with another way."""
    run = PyTorchLoop(optuna.create_study().ask(), {}, FakeSession(checkpoint_dir=tmp_path))
    run.kept["env"] = None if late else arcade(then=lambda: None)

    def train() -> None:
        for _ in run.epochs(3):
            run.kept["env"] = run.kept["env"] or arcade()
            run.report(0.0)

    with pytest.raises(UnstorableError, match=r"Make it anew in each epoch instead, from a seed"):
        train()


@pytest.mark.parametrize("keeps", [True, False])
def test_what_cannot_be_kept_is_said_with_its_name(
    keeps: bool, arcade: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In the warning of a variable of the loop, which advises to keep others."""
    session = FakeSession(checkpoint_dir=tmp_path / "study" / "trial")
    run = PyTorchLoop(optuna.create_study().ask(), {}, session)
    env = arcade() if keeps else arcade(then=lambda: None)
    for _ in run.epochs(3):
        run.report(env.step())
    (line,) = [each.getMessage() for each in caplog.records if " changes " in each.getMessage()]
    assert ("env (a variable of the loop, which run.kept cannot hold)" in line) is not keeps
    assert "Keep it in run.kept where that can hold it" in line


def fraction(value: float) -> float:
    return value / 10


class Patience:
    """Counts the epochs without a better value, and says so; as in many repositories."""

    def __init__(self, **code: Any) -> None:
        self.code = {"better": np.less, "say": print, "log": log.info, "logger": log, **code}
        self.best, self.counts = float("inf"), [0]

    def __call__(self, value: float) -> float:
        if self.code["better"](value, self.best):
            self.best = value
        else:
            self.counts[-1] += 1
            self.code["say"](f"{self.counts[-1]} epochs")
            self.code["log"]("%s epochs", self.counts[-1])
            self.code["logger"].warning("Worse")
        return float(self.code.get("scale", abs)(self.best + self.counts[-1]))


class Shown(Patience):
    """Has a ``state_dict`` to be looked at, and no way to load it."""

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}


def patient(
    session: FakeSession, code: dict[str, Any], *, late: bool, kind: type[Patience] = Patience
) -> Any:
    run = PyTorchLoop(optuna.create_study().ask(), {}, session)
    if not late:
        run.kept.setdefault("stop", kind(**code))
    seen = run.kept.setdefault("seen", [])
    for epoch in run.epochs(3):
        stop = run.kept.setdefault("stop", kind(**code))
        for x in run.batches(BATCHES):
            seen.append(stop((epoch * 7 + x * 5) % 11))
            session.tick()
        run.report(seen[-1])
    return told(seen), stop.best, stop.counts, stop.code


@pytest.mark.parametrize("kind", [Patience, Shown])
@pytest.mark.parametrize("late", [False, True], ids=["before the loop", "in it"])
def test_functions_that_have_a_name_come_back_in_kept_objects(
    late: bool, kind: type[Patience], tmp_path: Path
) -> None:
    """``print``, a comparison of NumPy, a logger and its methods; one's own if kept before."""
    code = {} if late else {"scale": fraction}
    train = functools.partial(patient, code=code, late=late, kind=kind)
    assert by_way_of_disk(train, tmp_path, 2, 4, 3) == train(FakeSession())


@pytest.mark.parametrize(
    ("code", "late", "reason"),
    [
        ({"scale": lambda value: value}, False, "code.scale is of function"),
        ({"scale": fraction}, True, r"it holds the function .*fraction, as nothing did that"),
    ],
    ids=["without a name", "in the loop"],
)
def test_another_function_in_a_kept_object_is_refused(
    code: dict[str, Any], late: bool, reason: str, tmp_path: Path
) -> None:
    """With the reason before what else may be wrong: a long message is cut off at its end."""
    reason = rf"^run\.kept\['stop'\] could not be made again: .{{,30}}{reason}"
    with pytest.raises(UnstorableError, match=reason):
        patient(FakeSession(checkpoint_dir=tmp_path), code, late=late)


def halved(value: float) -> float:
    return value / 2


@pytest.mark.parametrize("within", [False, True], ids=["itself", "in an object"])
def test_a_function_in_the_place_of_a_kept_one_is_refused(within: bool, tmp_path: Path) -> None:
    """Such a checkpoint could not be loaded; another that was kept before the loop may be there."""
    session = FakeSession(checkpoint_dir=tmp_path)
    run = PyTorchLoop(optuna.create_study().ask(), {}, session)
    run.kept.update({"it": fraction, "others": [told], "stop": Patience(scale=fraction)})

    def train() -> None:
        for epoch in run.epochs(4):
            put = [fraction, told, fraction, halved][epoch]
            if within:
                run.kept["stop"].code["scale"] = put
            else:
                run.kept["it"] = put
            for _ in run.batches(BATCHES):
                session.tick()
            run.report(epoch)

    name = "stop" if within else "it"
    reason = rf"^run\.kept\['{name}'\] could not be made again: it holds the function .*\.halved, "
    with pytest.raises(UnstorableError, match=reason):
        train()
    assert [value for _, _, value in session.reports] == [0, 1, 2]


class Best(NamedTuple):
    value: float = 0.0


@pytest.mark.parametrize("kind", [Patience, Best])
@pytest.mark.parametrize("count", [1, 40])
def test_an_object_of_a_local_class_in_the_place_of_a_kept_one_is_refused(
    count: int, kind: type[Any], tmp_path: Path
) -> None:
    """No other process finds that class, though the object before it could be made again."""
    session = FakeSession(checkpoint_dir=tmp_path)
    run = PyTorchLoop(optuna.create_study().ask(), {}, session)

    class Local(kind):  # type: ignore[misc]
        pass

    def train() -> None:
        for epoch, each in enumerate(run.epochs(3)):
            run.kept["it"] = [(Local if epoch else kind)() for _ in range(count)]
            for _ in run.batches(BATCHES):
                session.tick()
            run.report(each)

    run.kept["it"] = [kind()]
    reason = r"^run\.kept\['it'\] could not be made again: it holds a .*<locals>\.Local, "
    with pytest.raises(UnstorableError, match=reason):
        train()
    assert [value for _, _, value in session.reports] == [0]


def test_what_must_be_there_to_be_loaded_is_not_to_be_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A module is to be named: the warning of a variable says it, and so does who keeps it."""
    net = nn.Linear(1, 1)
    run = PyTorchLoop(
        optuna.create_study().ask(), {}, FakeSession(checkpoint_dir=tmp_path / "s" / "a")
    )
    for _ in run.epochs(3):
        nn.init.constant_(net.weight, net.weight.item() + 1)
        run.report(0.0)
    assert "net (a variable of the loop, which run.kept cannot hold)" in caplog.text
    run = PyTorchLoop(
        optuna.create_study().ask(), {}, FakeSession(checkpoint_dir=tmp_path / "s" / "b")
    )
    run.kept["nets"] = [net]
    with pytest.raises(UnstorableError, match=r"kept\['nets'\]\.0 is a torch.*\.Linear.* name it"):
        keep(run)


def keep(run: PyTorchLoop) -> None:
    for _ in run.epochs(3):
        run.report(0.0)


# -- files in memory ---------------------------------------------------------------------------


class Logged(nn.Module):
    """A layer with a log."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.text = nn.Linear(1, 1), io.StringIO()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print(x.item(), file=self.text)
        return self.net(x + 0.01 * len(self.text.getvalue()))


def saving(session: FakeSession) -> tuple[list[float], str, Any]:
    """A loop that keeps its best weights in a file."""
    torch.manual_seed(1)
    model = Logged()
    run, optimizer = made(session, model)
    best = run.kept.setdefault("best", io.BytesIO())
    losses = run.kept.setdefault("losses", [])
    for _ in run.epochs(4):
        for x in run.batches(BATCHES):
            descend(model(torch.tensor([x])).square().sum(), optimizer, losses, session)
            if losses[-1] <= min(losses):
                best.seek(0)
                best.truncate()
                torch.save(model.state_dict(), best)
        run.report(0.0)
    best.seek(0)
    return losses, model.text.getvalue(), told(dict(torch.load(best)))


@pytest.mark.parametrize("stops", [(3, 2), (4, 5)], ids=str)
def test_files_in_memory_come_back(
    stops: tuple[int, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Those that are kept, and those in attributes of a module."""
    assert by_way_of_disk(saving, tmp_path, *stops) == saving(FakeSession())
    assert "no checkpoint holds" not in caplog.text


def test_a_file_in_memory_that_is_not_kept_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The next process has an empty one."""
    run = PyTorchLoop(
        optuna.create_study().ask(), {}, FakeSession(checkpoint_dir=tmp_path / "s" / "t")
    )
    best = io.BytesIO()
    for _ in run.epochs(3):
        best.write(b"weights")
        run.report(0.0)
    assert "changes best (a variable of the loop) while it trains" in caplog.text


# -- attributes of modules and of their parameters ---------------------------------------------


class Flat(nn.Module):
    """Its parameters are parts of one tensor, and so is what it keeps in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1)
        self.flat = torch.cat([each.detach().reshape(-1) for each in self.net.parameters()])
        self.net.weight.data, self.net.bias.data = self.flat[:3].view(1, 3), self.flat[3:]
        self.held = {"noise": np.zeros(3), "lists": ([], [0.0])}
        self.best = self.net.weight.data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


def flattened(session: FakeSession) -> list[float]:
    """A loop that changes all weights at once, and arrays that it got from its module."""
    torch.manual_seed(1)
    model = Flat()
    run, optimizer = made(session, model)
    losses, noise = run.kept.setdefault("losses", []), model.held["noise"]
    first = model.held["lists"][0]
    for epoch in run.epochs(4):
        for x in run.batches(BATCHES):
            descend(model(torch.full((3,), x)).square().sum(), optimizer, losses, session)
            model.flat.add_(0.01)
            noise += losses[-1]
            first.append(losses[-1])
            losses.append(float(model.held["noise"].sum() + sum(model.held["lists"][0])))
            losses.append(model.best.sum().item())
            if epoch == 1 and run.batch == 1:
                model.best = model.best.clone()
        run.report(0.0)
    return losses


@pytest.mark.parametrize("stops", [(2, 3), (6, 1, 4)], ids=str)
def test_attributes_that_share_memory_still_do(
    stops: tuple[int, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A tensor of which the weights are parts; one that was replaced is no part of them again."""
    assert by_way_of_disk(flattened, tmp_path, *stops) == flattened(FakeSession())
    assert "no checkpoint holds" not in caplog.text


def binarised(session: FakeSession) -> tuple[list[float], list[Any]]:
    """A step of BinaryConnect: the weights in use are signs of those that are trained."""
    torch.manual_seed(1)
    model, scale = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.05, momentum=0.9)
    named = {"model": model, "optimizer": optimizer}
    run = PyTorchLoop(optuna.create_study().ask(), named, session)
    losses = run.kept.setdefault("losses", [])
    parameters: list[Any] = [*model.parameters(), scale]
    for _ in run.epochs(3):
        for x in run.batches(BATCHES):
            for each in parameters:
                if not hasattr(each, "org"):
                    each.org = each.data.clone()
                each.data = each.org.sign()
            loss = (model(torch.full((3,), x)) * scale - 0.1).square().sum()
            optimizer.zero_grad()
            loss.backward()
            for each in parameters:
                each.data.copy_(each.org)
            optimizer.step()
            for each in parameters:
                each.org.copy_(each.data.clamp_(-1, 1))
                each.data.sign_()
            losses.append(loss.item())
            session.tick()
        run.report(0.0)
    return losses, told([each.org for each in parameters])


@pytest.mark.parametrize("stops", [(2, 3), (4, 4)], ids=str)
def test_attributes_of_parameters_come_back(
    stops: tuple[int, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The weights of a binarised network are kept there."""
    assert by_way_of_disk(binarised, tmp_path, *stops) == binarised(FakeSession())
    assert "no checkpoint holds" not in caplog.text


def test_an_attribute_of_a_parameter_that_is_lost_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It cannot be stored; a private one belongs to a library."""

    def train(session: FakeSession) -> None:
        model: Any = nn.Linear(1, 1)
        model.weight.source = iter([1])
        run, _ = made(session, model)
        for _ in run.epochs(2):
            for _ in run.batches(BATCHES):
                model.weight.source, model.weight._own = iter([1]), iter([1])
                session.tick()
            run.report(0.0)

    by_way_of_disk(train, tmp_path, 3)
    assert "Trial 0 changes model.weight.source while it trains" in caplog.text


# -- buffers -----------------------------------------------------------------------------------


class Late(nn.Module):
    """Its statistics are those of the first batch, and it forgets others."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 1)
        self.inner.register_buffer("stat", None, persistent=False)
        self.register_buffer("first", torch.ones(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.inner.stat is None:
            self.inner.stat = x.detach() * 0.5
        if self.first is None:
            return self.inner(x) - self.inner.stat
        self.first = None
        return self.inner(x)


def late(session: FakeSession) -> list[float]:
    torch.manual_seed(1)
    model = Late()
    run, optimizer = made(session, model)
    losses = run.kept.setdefault("losses", [])
    for _ in run.epochs(3):
        for x in run.batches(BATCHES):
            descend(model(torch.tensor([x])).square().sum(), optimizer, losses, session)
        run.report(0.0)
    return losses


@pytest.mark.parametrize("stops", [(2, 3), (4, 1)], ids=str)
def test_a_buffer_that_begins_as_none_comes_back(stops: tuple[int, ...], tmp_path: Path) -> None:
    """As does one that is none by now."""
    assert by_way_of_disk(late, tmp_path, *stops) == late(FakeSession())
