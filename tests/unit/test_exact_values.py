"""State that a checkpoint could lose in silence comes back to the bit, or is refused by name."""

from __future__ import annotations

import copy
import functools
import io
import logging
import operator
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable
from enum import Enum, Flag
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from optuna_hermes.errors import SuspendError, UnstorableError
from optuna_hermes.suspend._modules._module_state import (
    beside_own_state,
    kept_groups,
    put_back,
    put_beside_own_state,
    state_of,
    undo_casts,
)
from optuna_hermes.suspend._modules._named_objects import NamedObjects
from optuna_hermes.suspend._values._classes import Classes
from optuna_hermes.suspend._values._custom import ValueReader, ValueWriter
from optuna_hermes.suspend._values._generators import generator_state
from optuna_hermes.suspend._values._kept import can_keep
from optuna_hermes.suspend._values._objects import Objects
from optuna_hermes.suspend._values._tree import frozen, pack, unpack

HERE = Classes([globals()], [__name__.partition(".")[0]])


class Own:
    """A class of the user's own, with whatever attributes a test gives it."""

    def __init__(self, **parts: Any) -> None:
        vars(self).update(parts)


class Colour(Flag):
    RED = 1
    BLUE = 2


class Phase(Enum):
    WARM = 1


def stored(tree: Any) -> Any:
    """A tree as it comes back from a file."""
    return unpack(*pack(frozen(tree), "trial 0"))


def through_disk(value: Any) -> Any:
    return ValueReader(HERE).node(stored(ValueWriter().write_only("it", value)), None)


def test_an_empty_tuple_is_stored_though_others_have_it_too() -> None:
    """As the key of a generator's seeds."""
    value, known = {"a": (), "rng": np.random.default_rng(3)}, {id(())}
    tree = ValueWriter(known).write_only("it", {"a": ()})
    assert ValueReader(HERE).node(tree, {"a": [1]}) == {"a": ()}
    again = ValueReader(HERE).node(stored(ValueWriter(known).write_only("it", value)), None)
    assert again["rng"].random() == value["rng"].random()


def test_a_type_of_numbers_between_shared_parts_shifts_nothing() -> None:
    """A value that is numbered when it is written is numbered when it is read."""
    shared = [1]
    value = {"a": (torch.float32, torch.Size([2])), "b": shared, "c": (torch.float32, shared)}
    again = through_disk(value)
    assert again == value
    assert again["c"][1] is again["b"]


def kept_again(kept: dict[str, Any], loads: int = 1) -> dict[str, Any]:
    """``run.kept`` in the next process."""
    before, after = NamedObjects({}, HERE), NamedObjects({}, HERE)
    before.kept.update(kept)
    tree = before.state_dict()
    for _ in range(loads):
        after.load_state_dict(stored(tree))
    return after.kept


# -- optimizers


class WithFullStatistics(torch.optim.Optimizer):
    """Keeps statistics of its own dtype and in nested containers, as Hugging Face's Adafactor."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            total = state.get("sums", [torch.zeros(2)])[0]
            state["sums"] = [total + parameter.grad.float() / 3]
            state["more"] = {"count": torch.tensor(2**24 + 1), "mean": total / 7}


def trained(
    dtype: torch.dtype, make: Callable[..., Any], steps: int = 3
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(2, 1, bias=False, dtype=dtype)
    optimizer = make(model.parameters())
    for _ in range(steps):
        model.weight.grad = torch.randn(1, 2).to(dtype)
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    ("dtype", "make"),
    [
        (torch.bfloat16, lambda parameters: torch.optim.ASGD(parameters, 0.1)),
        (torch.float64, torch.optim.NAdam),
        (torch.bfloat16, WithFullStatistics),
    ],
)
def test_states_of_optimizers_keep_their_dtype(dtype: torch.dtype, make: Any) -> None:
    """``Optimizer.load_state_dict`` rounds them to the dtype of the parameter."""
    model, optimizer = trained(dtype, make)
    other, resumed = trained(dtype, make, steps=1)
    tree = NamedObjects({"model": model, "optimizer": optimizer}).state_dict()
    NamedObjects({"model": other, "optimizer": resumed}).load_state_dict(stored(tree))
    first, second = optimizer.state_dict()["state"][0], resumed.state_dict()["state"][0]
    assert pack(first, "it")[1] == pack(second, "it")[1]
    assert str(first) == str(second)


class Around(torch.optim.Optimizer):
    """Has no state but that of another one."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base
        self.param_groups = base.param_groups

    def state_dict(self) -> dict[str, Any]:
        return {"base": self.base.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base.load_state_dict(state_dict["base"])


def test_an_optimizer_without_a_state_of_its_own() -> None:
    """It loads what its own method has written."""
    _, first = trained(torch.float32, torch.optim.NAdam)
    _, second = trained(torch.float32, torch.optim.NAdam, steps=1)
    tree = NamedObjects({"optimizer": Around(first)}).state_dict()
    NamedObjects({"optimizer": Around(second)}).load_state_dict(stored(tree))
    assert str(first.state_dict()) == str(second.state_dict())


def test_steps_of_optimizers_stay_in_main_memory() -> None:
    """Reading one on a device would wait for that in each step; a device stands for it here."""
    parameter = nn.Parameter(torch.zeros(2, device="meta"))
    optimizer = torch.optim.Adam([parameter])
    zeros = torch.zeros(2, dtype=torch.float64)
    own = {"step": torch.tensor(3.0), "exp_avg": zeros, "exp_avg_sq": zeros}
    saved = {**optimizer.state_dict(), "state": {0: own}}
    optimizer.load_state_dict(saved)
    undo_casts(optimizer, saved)
    state = optimizer.state[parameter]
    assert state["step"].device.type == "cpu"
    assert (state["exp_avg"].device.type, state["exp_avg"].dtype) == ("meta", torch.float64)


class Forgetful(torch.optim.SGD):
    """Has a ``state_dict`` of its own, without what it holds of its parameters."""

    def state_dict(self) -> dict[str, Any]:
        return {}


def test_what_is_beside_an_optimizer_s_own_state_is_moved_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A device, for which another one stands here, may have no room for all of it twice."""
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    optimizer, resumed = Forgetful(parameters), Forgetful(parameters)
    for each in parameters[1:]:
        optimizer.state[each] = {
            "step": torch.ones(1),
            "slow": torch.ones(2),
            "sums": [torch.ones(1)],
        }
    saved = stored(beside_own_state(optimizer))
    places = [[number, *place] for number in (1, 2) for place in (["slow"], ["sums", 0])]
    saved["by_parameter"]["on_device"] = places
    there: list[int] = []

    def device() -> torch.device:
        there.append(len(resumed.state))
        return torch.device("meta")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", device)
    put_beside_own_state(resumed, saved)
    assert there == [0, 1]
    assert [*map(id, resumed.state)] == [*map(id, parameters[1:])]
    for own in resumed.state.values():
        devices = [each.device.type for each in (own["step"], own["slow"], *own["sums"])]
        assert devices == ["cpu", "meta", "meta"]


class Full:
    """Has no room for its state."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise self.error


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), MemoryError()])
def test_a_checkpoint_that_has_no_room_is_not_taken_for_a_damaged_one(error: Exception) -> None:
    """Its trial goes on where there is room."""
    named = NamedObjects({"it": Full(error)})
    with pytest.raises(type(error)):
        named.load_state_dict(stored(named.state_dict()))


class Sharpness(torch.optim.Optimizer):
    """Keeps the optimizer that makes its steps out of its ``state_dict``, as many copies of SAM."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base_optimizer.step()

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.base_optimizer.param_groups = self.param_groups


class Two:
    """Several optimizers in containers, and a schedule of one of them."""

    def __init__(self, parameters: Any) -> None:
        first = Sharpness(parameters)
        self.parts = {"first": first}
        self.schedules = [torch.optim.lr_scheduler.StepLR(first, 1)]

    def step(self) -> None:
        self.parts["first"].step()
        self.schedules[0].step()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize("make", [Sharpness, Two])
def test_an_optimizer_in_another_one_is_named_with_it(make: Any) -> None:
    """Its momentum is there again, and it has the same groups as the one that holds it."""
    model, optimizer = trained(torch.float32, make)
    other, resumed = trained(torch.float32, make, steps=0)
    tree = NamedObjects({"model": model, "optimizer": optimizer}).state_dict()
    NamedObjects({"model": other, "optimizer": resumed}).load_state_dict(stored(tree))
    for net, each in ((model, optimizer), (other, resumed)):
        outer = each.parts["first"] if isinstance(each, Two) else each
        outer.param_groups[0]["lr"] *= 0.5  # as a schedule does
        net.weight.grad = torch.ones(1, 2)
        each.step()
    assert other.weight.tolist() == model.weight.tolist()


def test_groups_of_optimizers_stay_the_same_objects() -> None:
    """A loop may hold one, or their list, and set the rate there."""
    make = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    tree = NamedObjects({"it": trained(torch.float32, make)[1]}).state_dict()
    _, optimizer = trained(torch.float32, make, steps=0)
    groups, group = optimizer.param_groups, optimizer.param_groups[0]
    group["lr"] = 0.5
    NamedObjects({"it": optimizer}).load_state_dict(stored(tree))
    assert group["lr"] == 0.1
    assert optimizer.param_groups is groups
    assert groups[0] is group


# -- modules


def test_settings_of_modules_of_torch_are_watched() -> None:
    """One that the loop changes is not the initial one again, and the rest is the objective's."""
    nets = [nn.Sequential(nn.Dropout(0.1), nn.BatchNorm1d(2)) for _ in range(2)]
    before, after = (NamedObjects({"net": net}) for net in nets)
    before.unsaved.begin()
    nets[0][0].p, nets[0][1].momentum = 0.6, None
    tree = before.state_dict()
    assert {name: list(state) for name, state in tree["unsaved"].items()} == {
        "net.0": ["p"],
        "net.1": ["momentum"],
    }
    after.load_state_dict(stored(tree))
    assert (nets[1][0].p, nets[1][1].momentum) == (0.6, None)


def test_gradients_have_the_memory_format_of_their_parameters() -> None:
    """Sums over another order of the same numbers have other bits."""
    nets = [nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last) for _ in range(2)]
    inputs = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    optimizers = [torch.optim.Adam(net.parameters()) for net in nets]
    nets[0](inputs).square().mean().backward()
    optimizers[0].step()
    before, after = (
        NamedObjects({"net": net, "optimizer": each})
        for net, each in zip(nets, optimizers, strict=True)
    )
    after.load_state_dict(stored(before.state_dict()))
    first, second = nets[0].weight, nets[1].weight
    assert first.grad is not None
    assert second.grad is not None
    assert second.grad.stride() == first.grad.stride() == first.stride()
    assert second.grad.equal(first.grad)
    mean = optimizers[1].state[second]["exp_avg"]
    assert mean.stride() == optimizers[0].state[first]["exp_avg"].stride()


class Growing:
    """Counts the calls of its ``state_dict``, which is large or small."""

    def __init__(self, size: int) -> None:
        self.size, self.calls = size, 0

    def state_dict(self) -> dict[str, Any]:
        self.calls += 1
        return {"it": torch.zeros(self.size)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.size = len(state["it"])


def test_a_large_state_is_asked_for_once_at_an_epoch_s_begin() -> None:
    """A small one is, each time."""
    large, small = Growing(1 << 20), Growing(3)
    named = NamedObjects({"large": large, "small": small})
    states = [named.small_state()["others"] for _ in range(100)]
    assert small.calls == 100
    assert large.calls == 1
    assert all(each["large"] is None for each in states)
    assert all(len(each["small"]["state"]["it"]) == 3 for each in states)


def test_large_kept_values_are_left_out_at_an_epoch_s_begin() -> None:
    """Small ones beside them are not, and only these are restored there."""
    named = NamedObjects({}, HERE)
    steps = deque(({"state": np.zeros(4)} for _ in range(5000)), maxlen=5000)
    it = Own(n=1)
    file = io.BytesIO(bytes(1 << 20))
    named.kept.update(steps=steps, it=it, losses=[0.0] * (1 << 20), file=file, noise=[0.5])
    state = named.small_state()
    assert list(state["kept"]) == ["it", "noise"]
    named.kept["noise"][0], it.n = 0.25, 2
    named.load_small_state(state)
    assert list(named.kept) == ["steps", "it", "losses", "file", "noise"]
    assert (named.kept["noise"], it.n) == ([0.5], 1)
    assert named.kept["steps"] is steps


class Shadow:
    """Weights of its own, kept as a user's class does: whatever is loaded is taken as it is."""

    def __init__(self, device: str) -> None:
        self.shadow = {"w": torch.ones(2, device=device), "n": torch.ones(1)}

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "steps": (3, [self.shadow["w"]])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow, self.steps = state["shadow"], state["steps"]


def test_tensors_of_an_object_are_on_its_device_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint has them in main memory, and a user's class moves none; others stay there."""
    saved = state_of(Shadow("meta"))
    weight = torch.full((2,), 5.0)  # as it is read from a file
    saved["state"]["shadow"] = {"w": weight, "n": torch.ones(1)}
    saved["state"]["steps"] = (3, [weight])
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
    back = Shadow("meta")
    put_back(back, saved)
    assert back.shadow["w"].device.type == back.steps[1][0].device.type == "meta"
    assert back.shadow["n"].device.type == "cpu"


class MadeLate:
    """Has no state before its first step."""

    def state_dict(self) -> dict[str, Any]:
        raise KeyError("not begun")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


def test_an_object_whose_state_is_made_with_its_first_step_fails_nothing() -> None:
    """At an epoch's begin it has no small state; of a lost variable it only chooses words."""
    assert NamedObjects({"late": MadeLate()}).small_state()["others"] == {"late": None}
    assert not can_keep(MadeLate())


def test_a_learning_rate_that_is_a_tensor_stays_the_one_that_the_loop_changes() -> None:
    """Loading a state would put another one into the group."""
    rate, weight = torch.tensor(0.1), torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([weight], lr=rate, foreach=False)
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = torch.tensor(0.05)
    with kept_groups([optimizer]):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.05)


# -- containers and memory


def test_containers_with_two_references_stay_one() -> None:
    """Lists, dictionaries and sets of kept objects are what their other names refer to."""
    losses: list[float] = [1.0]
    seen, counts = {1}, {"a": 1}
    it = through_disk(
        Own(losses=losses, by_name={"loss": losses}, sets=(seen, seen), counts=[counts, counts])
    )
    it.losses.append(2.0)
    it.sets[0].add(2)
    it.counts[0]["a"] = 2
    assert it.by_name == {"loss": [1.0, 2.0]}
    assert it.sets[1] == {1, 2}
    assert it.counts[1] == {"a": 2}


def test_a_list_may_hold_itself() -> None:
    """A deque, which is made at once, may not: it is refused."""
    endless: list[Any] = [1]
    endless.append(endless)
    it = through_disk(endless)
    assert it[1] is it
    ring: deque[Any] = deque()
    ring.append(ring)
    with pytest.raises(SuspendError, match="holds itself"):
        through_disk(ring)


def test_kept_values_that_share_parts_still_do() -> None:
    """Also plain ones, which are otherwise written as they are, and in the order they had."""
    losses, table, world = [1.0], np.zeros(3), Own(t=0)
    kept = {
        "plain": losses,
        "number": 1,
        "agent": Own(world=world, losses=losses),
        "world": world,
        "tables": {"now": table, "best": table},
        "apart": [1.0],
    }
    again = kept_again(kept, loads=2)
    again["plain"].append(2.0)
    again["world"].t = 7
    again["tables"]["now"][0] = 5
    assert list(again) == list(kept)
    assert again["agent"].losses == [1.0, 2.0]
    assert again["agent"].world.t == 7
    assert again["tables"]["best"].tolist() == [5, 0, 0]
    assert again["apart"] == [1.0]


def test_plain_values_that_share_a_list_still_do() -> None:
    """No object of a class of the user's own is needed for that."""
    losses = [1.0]
    again = kept_again({"losses": losses, "metrics": {"loss": losses}})
    again["losses"].append(2.0)
    assert again["metrics"] == {"loss": [1.0, 2.0]}


def test_arrays_and_tensors_that_the_objective_holds_are_filled_again() -> None:
    """A trial's checkpoint is loaded when it is opened and once more before its first batch."""
    named = NamedObjects({}, HERE)
    table, weights = np.zeros(2), torch.zeros(2)
    named.kept.update(now=table, best=table, it=Own(weights=weights, table=np.ones(1)))
    tree = stored(named.state_dict())
    after = NamedObjects({}, HERE)
    after.load_state_dict(copy.deepcopy(tree))
    held = after.kept["now"], after.kept["it"].weights
    held[0][:], held[1][:] = 3, 3
    after.load_state_dict(tree)
    assert (after.kept["now"], after.kept["it"].weights) == held
    assert [each.tolist() for each in held] == [[0, 0], [0, 0]]


def views(kind: str) -> dict[str, Any]:
    if kind == "tensors":
        table = torch.zeros(4, 4)
        return {"kept": Own(all=table, part=table[:, :3])}
    if kind == "plain tensors":
        table = torch.zeros(4, 4)
        return {"all": table, "part": [table[0]]}
    if kind == "transposed":
        table = torch.zeros(4, 4)
        return {"kept": [table.t(), table]}
    array = np.zeros((4, 4))
    if kind == "plain arrays":
        return {"kept": {"all": array, "row": array[0]}}
    if kind == "an array and a tensor":
        return {"array": array, "tensor": torch.from_numpy(array)}
    return {"kept": [array[::2], array[::2]]}


@pytest.mark.parametrize(
    "kind",
    [
        *("tensors", "plain tensors", "transposed"),
        *("plain arrays", "an array and a tensor", "steps"),
    ],
)
def test_values_that_are_parts_of_others_are_refused(kind: str) -> None:
    """They would be apart afterwards, and writing to one would not change the other."""
    named = NamedObjects({}, HERE)
    named.kept.update(views(kind))
    with pytest.raises(UnstorableError, match=r"shares (it with|the memory of) "):
        named.state_dict()


def test_parts_that_do_not_overlap_are_stored() -> None:
    """Columns of one table, and rows."""
    left, right = torch.arange(8.0).reshape(2, 4).chunk(2, dim=1)
    upper, lower = np.arange(4.0).reshape(2, 2)
    again = kept_again({"left": left, "right": right, "rows": [upper, lower]})
    assert again["right"].tolist() == right.tolist()
    assert [each.tolist() for each in again["rows"]] == [[0, 1], [2, 3]]


def test_tied_weights_are_stored() -> None:
    """A ``state_dict`` has the same numbers twice, also in another shape; they stay tied."""
    weight = nn.Parameter(torch.arange(4.0))
    it = through_disk([weight.detach(), weight.detach(), weight.data.view(2, 2), weight])
    it[0][3] = 7
    assert it[1][3] == it[2][1, 1] == it[3][3] == 7
    assert it[3].requires_grad
    assert not it[2].requires_grad


def test_an_array_and_its_transpose_share_memory_again() -> None:
    """They have the same numbers in the order of memory, not in that of their indices."""
    table = np.arange(6.0).reshape(2, 3)
    for pair in ([table, table.T], [table.T, table]):
        first, second = through_disk(pair)
        assert first.tolist() == pair[0].tolist()
        assert second.tolist() == pair[1].tolist()
        first[0, 0] = 7
        assert second[0, 0] == 7


# -- flags and generators


def test_combined_flags_come_back() -> None:
    """A combination of members has no name of its own."""
    for flags in (Colour.RED | Colour.BLUE, Colour.RED, Colour(0)):
        assert through_disk([flags]) == [flags]
    assert kept_again({"flags": Colour.RED | Colour.BLUE})["flags"] == Colour.RED | Colour.BLUE
    assert through_disk(Phase.WARM) is Phase.WARM


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (["flag", __name__, "Colour", 64], "64 of .*Colour"),
        (["enum", __name__, "Phase", "COLD"], "'COLD' of .*Phase"),
        (["enum", __name__, "Own", "name"], "Own, which is none now"),
        (["flag", __name__, "Phase", 1], "Phase, which is none now"),
    ],
)
def test_members_that_are_gone_are_named(node: list[Any], message: str) -> None:
    """An objective that was edited has perhaps others."""
    with pytest.raises(SuspendError, match=message):
        ValueReader(HERE).node(node, None)


@pytest.mark.parametrize(
    "node",
    [
        ["function", "posix", "system"],
        ["function", "builtins", "eval"],
        ["function", "numpy", "load"],
        ["function", __name__, "through_disk"],
        ["logger", "root", "addHandler"],
        ["logger", "root", "__reduce__"],
    ],
)
def test_no_checkpoint_chooses_what_code_there_is(node: list[Any]) -> None:
    """Neither of a library, nor of the user's own file unless it was kept before the loop."""
    with pytest.raises(SuspendError, match="it holds the function"):
        ValueReader(HERE).node(node, None)


def test_functions_of_kept_values_are_found_without_writing_these(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A buffer of a million transitions would be converted anew at each start of a process."""
    attributed: Any = OrderedDict()
    attributed.made_by = stored
    classes = Classes([globals()], [__name__])
    named = NamedObjects({}, classes)
    named.kept["it"] = [
        *(deque([through_disk]), {kept_again: 1.0}, np.array([pack, None], object)),
        *((frozenset([unpack]),), attributed, Own(item={"last": [frozen]}, say=print)),
    ]
    named.kept["itself"] = can_keep
    with monkeypatch.context() as patch:
        patch.setattr(ValueWriter, "write", None)
        named.note_kept()
    tree = stored(named.state_dict())
    again = NamedObjects({}, classes)
    again.load_state_dict(tree)
    first, keys, array, *_, own = again.kept["it"]
    assert (first[0], *keys, array[0]) == (through_disk, kept_again, pack)
    assert own.item["last"] == [frozen]
    assert again.kept["it"][4].made_by is stored
    assert again.kept["itself"] is can_keep


class Shown(Own):
    """Has a ``state_dict`` for its log alone: nothing is loaded by it."""

    def state_dict(self) -> dict[str, Any]:
        return {"best": vars(self)["best"]}


def test_functions_of_an_object_that_loads_no_state_are_found() -> None:
    """It is written by its attributes, as if it had no ``state_dict``."""
    classes = Classes([globals()], [__name__])
    named = NamedObjects({}, classes)
    named.kept["stop"] = Shown(metric=stored, best=1.0)
    named.note_kept()
    tree = stored(named.state_dict())
    again = NamedObjects({}, classes)
    again.load_state_dict(tree)
    assert (again.kept["stop"].metric, again.kept["stop"].best) == (stored, 1.0)


def test_functions_that_lie_behind_code_are_none_of_a_kept_value() -> None:
    """Else all of a module that holds another one could be named by a checkpoint."""
    classes = Classes([globals()], [__name__])
    named = NamedObjects({}, classes)
    named.kept["it"] = [np.linalg, Own, Own().__init__, functools.partial(stored)]
    named.kept["log"] = logging.getLogger(__name__)
    named.note_kept()
    assert classes.functions == set()


@pytest.mark.parametrize("bits", [np.random.PCG64, np.random.MT19937, np.random.Philox])
def test_generators_have_the_same_children_afterwards(bits: Any) -> None:
    """``spawn`` counts its calls in the seeds, which are not in the state; the object stays."""
    generator = np.random.Generator(bits([3, 4]))
    (child,) = generator.spawn(1)
    for each in (generator, child):
        each.random(3)
        present = np.random.Generator(bits(9))
        present.spawn(5)
        resumed = Own(generator=present)
        tree = stored(Objects("it", Own(generator=each)).state_dict())
        Objects("it", resumed).load_state_dict(tree)
        assert resumed.generator is present
        assert present.spawn(2)[1].random() == each.spawn(2)[1].random()
        assert present.random() == each.random()
        assert through_disk([each])[0].spawn(1)[0].random() == each.spawn(1)[0].random()


def test_generators_of_the_process_stay_these() -> None:
    """What draws from one goes on to draw from it."""
    there = [torch.default_generator, np.random.mtrand._rand, random.seed.__self__]  # type: ignore[attr-defined]
    assert all(map(operator.is_, through_disk(there), there))


@pytest.mark.parametrize(
    "make",
    [
        *(np.random.default_rng, np.random.RandomState, random.Random),
        *(lambda seed: torch.Generator().manual_seed(seed),),
        *(lambda seed: np.random.Generator(np.random.Philox(seed)),),
    ],
)
def test_two_generators_do_not_become_the_one_that_is_there(make: Any) -> None:
    """It becomes the first of them; one of another kind does not."""
    tree = stored(ValueWriter().write_only("it", [make(1), make(2)]))
    there = make(3)
    one, other = ValueReader(HERE).node(tree, [there, there])
    assert one is there
    assert states(one) == states(make(1))
    assert states(other) == states(make(2))
    assert ValueReader(HERE).node(tree, [np.random.Generator(np.random.SFC64(0))])[0] is not there


def states(generator: Any) -> Any:
    return pack(generator_state(generator), "it")[1]


def test_generators_without_seeds_come_back() -> None:
    """Old checkpoints have none, and others may bring a sequence of their own."""

    class Sequence(np.random.bit_generator.ISeedSequence):
        def generate_state(self, n_words: int, dtype: Any = np.uint32) -> Any:
            return np.arange(n_words, dtype=dtype)

    generator = np.random.Generator(np.random.PCG64(Sequence()))  # type: ignore[arg-type]
    assert through_disk([generator])[0].random() == generator.random()


UNKNOWN = "Weights" if sys.version_info >= (3, 14) else "'Weights'"  # must be there before
OF_FILES = f"""
class Loads(nn.Linear):
    def state_dict(self, *args, **kwargs):
        return {{"bias": self.bias.detach()}}

    def load_state_dict(self, state: {UNKNOWN}, strict: bool = True):
        return super().load_state_dict(state, strict)
"""


def test_annotations_may_be_for_type_checkers_only() -> None:
    """Weights that a ``state_dict`` leaves out come back whatever these name."""
    own: dict[str, Any] = {"nn": nn, "__name__": __name__}
    exec(compile(OF_FILES, "own.py", "exec", dont_inherit=True), own)
    module, other = own["Loads"](2, 1), own["Loads"](2, 1)
    NamedObjects({"it": other}).load_state_dict(stored(NamedObjects({"it": module}).state_dict()))
    assert [each.tolist() for each in other.parameters()] == [
        each.tolist() for each in module.parameters()
    ]
