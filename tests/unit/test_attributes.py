"""Attributes that change in training: what is looked at when a trial waits."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel

from optuna_hermes.suspend._modules import _unsaved
from optuna_hermes.suspend._modules._module_state import drop_buffers, ignored_of
from optuna_hermes.suspend._modules._unsaved import (
    Attributes,
    ChangedAttributes,
    optimizer_attributes,
)


class Owner:
    """An object with a buffer of experiences, whose training makes further attributes."""

    def __init__(self) -> None:
        self.buffer = deque((n, 0.5 * n, torch.zeros(1)) for n in range(3))
        self.made: Any = None


@pytest.fixture
def owner() -> Owner:
    return Owner()


@pytest.fixture
def attributes(owner: Owner) -> Attributes:
    """The owner's attributes as before the first batch."""
    attributes = Attributes("agent", owner)
    attributes.note(attributes.classes())
    attributes.begin()
    return attributes


def test_what_the_next_process_would_lack_is_found_without_writing_the_rest(
    owner: Owner, attributes: Attributes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial asks at each suspension, and a large buffer takes long to write."""
    written, write = [], attributes._written

    def record(name: str, value: Any) -> list[Any]:
        written.append(name)
        return write(name, value)

    monkeypatch.setattr(attributes, "_written", record)
    owner.buffer.append((4, 2.0, torch.ones(1)))
    owner.made = [owner.buffer, {"a": (1, b"b", None)}]
    assert attributes.find_unmade() == set()
    assert written == []
    owner.made = threading.Lock()
    assert attributes.find_unmade() == {"agent.made"}
    assert written == ["made"]
    owner.made = None
    assert attributes.find_unmade() == set()
    assert set(attributes.state_dict()) == {"buffer", "made"}


class Unread:
    """An object whose state cannot be read at present."""

    def state_dict(self) -> dict[str, Any]:
        raise KeyError("state")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing comes back."""


def test_an_object_that_raises_is_lacking(owner: Owner, attributes: Attributes) -> None:
    """Whatever error it is, it does not end the training."""
    owner.made = Unread()
    assert attributes.state_dict() == {}
    assert attributes.unmade == {"agent.made"}


def test_what_is_too_large_to_be_written_is_lacking(
    owner: Owner, attributes: Attributes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although it consists of numbers only."""
    monkeypatch.setattr(_unsaved, "_MOST_PARTS", 100)
    owner.made = [[n] for n in range(200)]
    assert attributes.find_unmade() == {"agent.made"}
    assert attributes.lost == set()


def test_what_is_deleted_is_deleted_in_the_next_process(
    owner: Owner, attributes: Attributes
) -> None:
    """Until it is there again; also after the process that deleted it has ended."""
    del owner.made
    assert attributes.find_unmade() == set()
    state = attributes.state_dict()
    assert state == {"made": ["gone"]}
    there = Owner()
    after = Attributes("agent", there)
    after.load_state_dict(state)
    after.begin()
    assert not hasattr(there, "made")
    assert after.state_dict() == state
    there.made = 1
    assert after.state_dict() == {"made": ["plain", 1]}


def test_a_second_name_of_a_buffer_is_not_deleted() -> None:
    """Of two names the first is saved; a buffer without one was deleted by the training."""
    module = nn.Module()
    for name, value in {"a": torch.ones(1), "gone": torch.ones(2), "none": None}.items():
        module.register_buffer(name, value, persistent=False)
    module.register_buffer("b", module.a, persistent=False)
    drop_buffers(module, dict.fromkeys("a"))
    assert list(module._buffers) == ["a", "b"]


class UsersLayer(nn.Module):
    """One whose attributes are all the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.weight = 0, nn.Parameter(torch.zeros(1))


def test_modules_that_are_gone_from_a_list_are_let_go() -> None:
    """At once: their memory may be needed; and they are no part of the state."""
    module: Any = nn.Module()
    module.copies = [UsersLayer() for _ in range(2)]
    gone = weakref.ref(module.copies[1])
    changes = ChangedAttributes(lambda: {"": Attributes("module", module)})
    changes.begin()
    for each in module.copies:
        each.seen = 1
    key = "inner  copies.{}."
    assert {*changes.state_dict()} == {"", key.format(0), key.format(1)}
    del each, module.copies[1]
    assert gone() is None
    assert {*changes.state_dict()} == {"", key.format(0)}


def after_restart(made: Callable[[], Any], change: Callable[[Any], None]) -> tuple[Any, Any]:
    """What a training has changed, and what the next process has instead of it."""

    def watched() -> tuple[Any, ChangedAttributes]:
        owner = made()
        changes = ChangedAttributes(lambda: {"": Attributes("owner", owner)})
        changes.begin()
        return owner, changes

    (owner, changes), (again, others) = watched(), watched()
    change(owner)
    assert changes.unmade() == []
    others.load_state_dict(changes.state_dict())
    assert changes.lost == others.lost == []
    return owner, again


def test_modules_that_have_changed_places_in_objects_are_read() -> None:
    """The first that is replaced is in no object until the second has it."""
    owner, again = after_restart(
        lambda: SimpleNamespace(agents=[SimpleNamespace(net=nn.Linear(1, 1)) for _ in range(2)]),
        lambda owner: owner.agents.reverse(),
    )
    pairs = zip(owner.agents, again.agents, strict=True)
    assert all(torch.equal(one.net.weight, other.net.weight) for one, other in pairs)


def test_parameters_that_lists_share_come_back_as_one() -> None:
    """A list that has another one by then fills none that another list has."""

    def made() -> Any:
        prompts = [nn.Parameter(torch.full((1,), 1.0 * n)) for n in range(3)]
        return SimpleNamespace(prompts=prompts, best=prompts[:1], worst=[])

    def change(owner: Any) -> None:
        owner.best[0], owner.worst = owner.prompts[1], owner.prompts[2:]

    _, again = after_restart(made, change)
    assert [each.item() for each in again.prompts] == [0, 1, 2]
    assert (again.best[0], again.worst[0]) == (again.prompts[1], again.prompts[2])


def test_references_to_parts_that_were_swapped_are_to_those_in_their_places() -> None:
    """The modules that have the parts load these states by their places, too."""

    def made() -> Any:
        agent = nn.ModuleDict({"net": nn.Linear(1, 1), "old": nn.Linear(1, 1)})
        return SimpleNamespace(agents=[agent], chosen=[agent["net"]])

    def change(owner: Any) -> None:
        (agent,) = owner.agents
        agent["net"], agent["old"] = agent["old"], agent["net"]
        owner.chosen = [agent["net"]]

    owner, again = after_restart(made, change)
    assert again.chosen == [again.agents[0]["net"]]
    pairs = zip(owner.agents[0].parameters(), again.agents[0].parameters(), strict=True)
    assert all(map(torch.equal, *zip(*pairs, strict=True)))


def test_a_module_that_is_in_its_list_again_is_saved() -> None:
    """The next process has it as it was before it was changed, whenever that was."""
    module: Any = nn.Module()
    module.copies = [UsersLayer()]
    changes = ChangedAttributes(lambda: {"": Attributes("module", module)})
    changes.begin()
    layer = module.copies[0]
    layer.seen = 1
    before = changes.state_dict()
    module.copies.remove(layer)
    changes.state_dict()
    module.copies.append(layer)
    assert before["inner  copies.0."] == {"seen": ["plain", 1]}
    assert changes.state_dict()["inner  copies.0."] == before["inner  copies.0."]


class Lazy(LazyModuleMixin, nn.Module):
    """A user's layer that gets its size with the first batch, and a part on first use."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.UninitializedParameter()
        self.part: Any = None

    def initialize_parameters(self, x: torch.Tensor) -> None:  # type: ignore[override]
        self.weight.materialize(x.shape)

    def forward(self, x: torch.Tensor) -> Any:
        self.part = self.part or nn.Identity()
        return self.part(x * self.weight)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_what_each_process_deletes_or_makes_a_part_of_stays() -> None:
    """A lazy module's own hooks go with its first batch, and layers may be made on first use."""
    layer = Lazy()
    attributes = Attributes("layer", layer, ignored_of(layer))
    attributes.begin()
    layer(torch.ones(2))
    assert "_initialize_hook" not in vars(layer)
    assert "part" not in vars(layer)
    assert attributes.state_dict() == {}


OF_TORCH: dict[str, Callable[[], nn.Module]] = {
    "layers": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Conv1d(2, 2, 1)),
    "recurrent": lambda: nn.LSTM(4, 4),
    "attention": lambda: nn.TransformerEncoderLayer(4, 1),
    "averages": lambda: AveragedModel(nn.Linear(4, 4)),
    "pruned": lambda: prune.random_unstructured(nn.Linear(4, 4), "weight", 0.5),
    "parametrized": lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
}


@pytest.mark.parametrize("case", OF_TORCH)
def test_what_torch_keeps_in_its_own_objects_is_left_out(case: str) -> None:
    """It is no value of the user's."""
    module = OF_TORCH[case]()
    optimizer = torch.optim.Adam(module.parameters(), foreach=True)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    every = {
        place: Attributes(place, part, ignored_of(part)) for place, part in module.named_modules()
    }
    every |= optimizer_attributes("optimizer", optimizer, ())
    for each in every.values():
        each.note(each.classes())
        each.begin()
    for _ in range(2):
        out = module(torch.rand(2, 4))
        (out[0] if isinstance(out, tuple) else out).sum().backward()
        optimizer.step()
        schedule.step()
    assert all(each.state_dict() == {} for each in every.values())
    assert not any(each.lost or each.unmade for each in every.values())


def test_a_method_is_compared_without_looking_through_the_whole_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of many modules may have one, and an attribute that leads to all others."""
    owners = [Owner() for _ in range(50)]
    known = {id(each) for each in owners}
    found, walk = [], _unsaved.reachable
    monkeypatch.setattr(
        _unsaved,
        "reachable",
        lambda *args, **kwargs: found.append(walk(*args, **kwargs)) or walk(*args, **kwargs),
    )
    owners[0].made, vars(owners[0])["method"] = [owners], owners[0].__init__  # type: ignore[misc]
    Attributes("owner", owners[0], known=known).fingerprints()
    assert len(found) == 1
    assert not known & found[0].keys()
    assert len(found[0]) < len(owners)
