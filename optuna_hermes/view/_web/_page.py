"""The web page's content as plain JSON, from a study's history and a broker's status; no I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from optuna_hermes.view import _words as words
from optuna_hermes.view._history import StudyHistory
from optuna_hermes.view._web._curves import Charts, bars, beginning
from optuna_hermes.view._web._devices import DeviceRows
from optuna_hermes.view._web._trials import LIVE, OVER, Json, rounded, shown_trials


@dataclass(frozen=True, kw_only=True)
class Scene:
    """The input of a page.

    Args:
        name: the study's name, None if no study is known.
        named: true if the user has named it; otherwise it is one that the broker serves.
        history: from its ledger, None if that could not be read or there is none.
        broker: status of this host's broker, None if none answers.
        was_served: true if a broker has served the study since this server began.
        problem: the reason why the ledger could not be read.
        wishes: overrides by trial, as the ledger has them.
        now: wall clock seconds (Unix time).
    """

    name: str | None
    named: bool = False
    history: StudyHistory | None = None
    broker: Mapping[str, Any] | None = None
    was_served: bool = False
    problem: str | None = None
    wishes: Mapping[int, str] = field(default_factory=dict)
    now: float = 0.0


class Painter:
    """Maker of pages; a part that has not changed since the last page is the same object."""

    def __init__(self) -> None:
        self._charts = Charts()
        self._devices = DeviceRows()

    def paint(self, scene: Scene) -> Json:
        """The page of a scene."""
        entry, history = served(scene), scene.history
        trials = shown_trials(history, entry, scene.wishes)
        live = _live(scene, entry, trials)
        begin = beginning(history)
        return {
            "study": _study(scene, entry),
            "live": live,
            "notes": list(_notes(scene, entry, is_away=live["is"] == "away")),
            "totals": _totals(scene, entry),
            "best": _best(scene, entry, trials),
            "trials": trials,
            "curves": self._charts.curves(history, trials),
            "path": self._charts.path(history),
            "begin": begin,
            "bars": bars(history, begin),
            "devices": self._devices.shown(scene.broker, scene.now),
            "key": history.key if history else None,
        }


def served(scene: Scene) -> Mapping[str, Any] | None:
    """The study's entry in the broker's status, None if it does not serve it."""
    entries = scene.broker["studies"] if scene.broker else ()
    if scene.history is not None:
        return next((each for each in entries if each["key"] == scene.history.key), None)
    return next((each for each in entries if each["name"] == scene.name), None)


def _study(scene: Scene, entry: Mapping[str, Any] | None) -> Json:
    others = [each["name"] for each in scene.broker["studies"]] if scene.broker else []
    return {
        "name": scene.name,
        "maximize": bool(scene.history and scene.history.maximize),
        "policy": entry["policy"] if entry else None,
        "host": scene.broker["host"] if scene.broker else None,
        "others": [name for name in others if name != scene.name],
        "named": scene.named,
        "commands": scene.history is not None,
    }


def _live(scene: Scene, entry: Mapping[str, Any] | None, trials: Json) -> Json:
    """The activity of the study, as a key word and as a text."""
    states = [trial["state"] for trial in trials.values()]
    waiting = sum(state not in OVER for state in states)
    if entry is not None and not entry["finished"]:
        return {"is": "live", "text": "Leaving" if entry["draining"] else "Training"}
    if entry is not None or (states and not waiting):
        return {"is": "ended", "text": "Ended"}
    if scene.broker is None and scene.was_served:
        return {"is": "away", "text": "The broker is away"}
    if any(state in LIVE for state in states):
        return {"is": "elsewhere", "text": "Training on another host"}
    nobody = scene.broker is None and not scene.named
    return {"is": "still", "text": "No broker runs on this host" if nobody else "Not running"}


def _notes(scene: Scene, entry: Mapping[str, Any] | None, *, is_away: bool) -> Iterator[str]:
    """Messages about problems of the study."""
    if scene.problem is not None:
        yield scene.problem
    if is_away:
        yield (
            "No broker answers on this host. Trials that train go on, and what is shown is from "
            "the ledger; what is wanted of trials counts when it is back."
        )
    if entry is None:
        return
    if entry["away_seconds"] is not None:
        away = words.duration(entry["away_seconds"])
        yield f"The database does not answer since {away}; training goes on."
    if entry["no_room"]:
        yield (
            f"No device has the memory for {words.ranges(entry['no_room'])} until another trial "
            "has left it."
        )
    if entry["problem"]:
        yield entry["problem"]
    if entry.get("all_held"):
        yield "Every trial that could train is held: let one go, and it trains."


def _totals(scene: Scene, entry: Mapping[str, Any] | None) -> Json:
    """Totals without leases that have not ended: the page itself counts those up."""
    history = scene.history
    if entry is not None:
        return {
            "device_seconds": round(entry["device_seconds"] - entry["held_seconds"], 1),
            "watt_hours": rounded(entry["watt_hours"]),
            "switches": entry["switches"],
            "overhead_seconds": round(entry["overhead_seconds"], 1),
            "spent_seconds": round(entry["spent_seconds"] - entry["held_seconds"], 1),
            "unstarted": entry["unstarted"],
        }
    return {
        "device_seconds": round(history.device_seconds, 1) if history else 0.0,
        "watt_hours": rounded(history.watt_hours) if history else None,
        "switches": None,
        "overhead_seconds": None,
        "spent_seconds": None,
        "unstarted": None,
    }


def _best(scene: Scene, entry: Mapping[str, Any] | None, trials: Json) -> Json | None:
    """The trial whose last value is the best."""
    sign = -1.0 if scene.history and scene.history.maximize else 1.0
    if scene.history is None:
        return dict(entry["best"]) if entry and entry["best"] else None
    known = [(sign * t["value"], int(n)) for n, t in trials.items() if t["value"] is not None]
    if not known:
        return None
    value, number = min(known)
    return {"trial": number, "value": sign * value}
