"""What the web page draws, as plain JSON, out of a study's history and a broker's status; pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from optuna_hermes.view import _words as words
from optuna_hermes.view._history import Bar, History, Point, TrialHistory, best_so_far

DIGITS = 6
"""Significant digits of values: more than a screen has pixels."""

OVER = ("done", "failed")
_LIVE = ("running", "parked")

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What is known when a page is made.

    Args:
        name: the study's name, None if no study is known.
        history: what its ledger tells, None if it could not be read or there is none.
        broker: what this host's broker tells, None if none answers.
        was_served: whether a broker was seen to serve the study since this server began.
        problem: why the ledger could not be read.
        wishes: what people want of trials, by number, as the ledger knows it.
        now: wall clock seconds (Unix time).
    """

    name: str | None
    history: History | None = None
    broker: Mapping[str, Any] | None = None
    was_served: bool = False
    problem: str | None = None
    wishes: Mapping[int, str] = field(default_factory=dict)
    now: float = 0.0


class Painter:
    """Makes pages; what has not changed since the last one is the same object in the next."""

    def __init__(self) -> None:
        self._columns: dict[int, tuple[tuple[Point, ...], Json]] = {}
        self._best: tuple[History | None, list[list[Any]]] = (None, [])
        self._since: dict[tuple[str, int], tuple[float, float]] = {}

    def paint(self, scene: Scene) -> Json:
        """The page of a scene."""
        entry = served(scene)
        key = scene.history.key if scene.history else None
        trials = _trials(scene, entry)
        live = _live(scene, entry, trials)
        devices = self._devices(scene)
        begin = _begin(scene.history)
        return {
            "study": _study(scene, entry),
            "live": live,
            "notes": list(_notes(scene, entry, is_away=live["is"] == "away")),
            "totals": _totals(scene, entry),
            "best": _best(scene, entry, trials),
            "trials": trials,
            "curves": self._curves(scene.history),
            "path": self._path(scene.history),
            "begin": begin,
            "bars": _bars(scene.history, begin),
            "devices": devices,
            "key": key,
        }

    def _curves(self, history: History | None) -> Json:
        found = {}
        for trial in history.trials if history else ():
            points, columns = self._columns.get(trial.number, (None, None))
            if points is not trial.points or columns is None:
                columns = _columns(trial.points)
                self._columns[trial.number] = (trial.points, columns)
            if trial.points:
                found[str(trial.number)] = columns
        return found

    def _path(self, history: History | None) -> list[list[Any]]:
        """Best so far against device time; as before if nobody has reported since."""
        before, path = self._best
        same = before is not None and history is not None and before.position == history.position
        if history is not None and not (same and before and before.key == history.key):
            path = [
                [round(best.device_seconds, 2), rounded(best.value), best.trial]
                for best in best_so_far(history)
            ]
        self._best = (history, path)
        return path

    def _devices(self, scene: Scene) -> list[Json]:
        devices = scene.broker["devices"] if scene.broker else ()
        labels = short([device["id"] for device in devices])
        return [
            _device(device, label, self._holder(device, scene.now))
            for device, label in zip(devices, labels, strict=True)
        ]

    def _holder(self, device: Mapping[str, Any], now: float) -> Json | None:
        """Who has a device. Its times are points of the wall clock, so that they stand still."""
        holder = device["holder"]
        if holder is None:
            return None
        lease = (device["id"], holder["epoch"])
        times = (now - holder["since_seconds"], now + holder["left_seconds"])
        known = self._since.get(lease)
        if known is None or max(abs(a - b) for a, b in zip(times, known, strict=True)) > 0.5:
            known = times
        self._since = {k: v for k, v in self._since.items() if k[0] != device["id"]}
        self._since[lease] = known
        return {
            "study": holder["study"],
            "trial": holder["trial"],
            "yielding": holder["state"] == "yielding",
            "since": round(known[0], 2),
            "until": round(known[1], 2),
        }


def served(scene: Scene) -> Mapping[str, Any] | None:
    """The study's entry in the broker's status, None if it does not serve it."""
    entries = scene.broker["studies"] if scene.broker else ()
    if scene.history is not None:
        return next((each for each in entries if each["key"] == scene.history.key), None)
    return next((each for each in entries if each["name"] == scene.name), None)


def rounded(value: float | None) -> float | None:
    """A value for JSON, which has no NaN and no infinity."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{DIGITS}g}")


def short(ids: Sequence[str]) -> list[str]:
    """Names of devices for people: of a UUID its beginning, as long as it takes to be one's own.

    Example:
        >>> short(["GPU-5c2f0a11-aaaa", "GPU-5c2f0a12-bbbb", "cpu:0"])
        ['GPU-5c2f0a11', 'GPU-5c2f0a12', 'cpu:0']
    """
    for length in range(8, 48, 2):
        cut = [id_ if len(id_) <= length + 4 else id_[: length + 4].rstrip("-") for id_ in ids]
        if len(set(cut)) == len(set(ids)):
            return cut
    return list(ids)


def _study(scene: Scene, entry: Mapping[str, Any] | None) -> Json:
    others = [each["name"] for each in scene.broker["studies"]] if scene.broker else []
    return {
        "name": scene.name,
        "maximize": bool(scene.history and scene.history.maximize),
        "policy": entry["policy"] if entry else None,
        "host": scene.broker["host"] if scene.broker else None,
        "others": [name for name in others if name != scene.name],
        "has_ledger": scene.history is not None,
        "commands": scene.history is not None,
    }


def _live(scene: Scene, entry: Mapping[str, Any] | None, trials: Json) -> Json:
    """What goes on, in a word and in a sentence."""
    states = [trial["state"] for trial in trials.values()]
    waiting = sum(state not in OVER for state in states)
    if entry is not None and not entry["finished"]:
        return {"is": "live", "text": "Leaving" if entry["draining"] else "Training"}
    if entry is not None or (states and not waiting):
        return {"is": "ended", "text": "Ended"}
    if scene.broker is None and scene.was_served:
        return {"is": "away", "text": "The broker is away"}
    if any(state in _LIVE for state in states):
        return {"is": "elsewhere", "text": "Training on another host"}
    return {"is": "still", "text": "Not running"}


def _notes(scene: Scene, entry: Mapping[str, Any] | None, *, is_away: bool) -> Iterator[str]:
    """What people should know besides."""
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
    """Device time without that of leases which are not over: the page counts that itself."""
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


def _trials(scene: Scene, entry: Mapping[str, Any] | None) -> Json:
    """Every trial by its number: the broker knows better where it is, the ledger what it was."""
    told = {run["trial"]: run for run in entry.get("runs", ())} if entry else {}
    known = {trial.number: trial for trial in scene.history.trials} if scene.history else {}
    return {
        str(number): _trial(known.get(number), told.get(number), scene.wishes.get(number))
        for number in sorted({*told, *known})
    }


def _trial(known: TrialHistory | None, told: Mapping[str, Any] | None, wish: str | None) -> Json:
    found: Json = {}
    if known is not None:
        found = _of_ledger(known, wish)
    if told is not None and found.get("state") not in OVER:
        found |= {
            "state": told["state"],
            "tier": told["tier"],
            "device": told["device"],
            "units": told["units"],
            "value": rounded(told["value"]),
            "slices": told["slices"],
            "suspensions": told["suspensions"],
            "device_seconds": round(told["device_seconds"], 2),
            "watt_hours": rounded(told["watt_hours"]),
            "wish": told.get("wish"),
        }
    return found


def _of_ledger(known: TrialHistory, wish: str | None) -> Json:
    run, last = known.run, known.points[-1] if known.points else None
    return {
        "state": known.state,
        "tier": run.tier if known.state in _LIVE else None,
        "device": None,
        "host": run.host,
        "units": last.unit if last else 0,
        "value": rounded(last.value) if last else None,
        "slices": run.slices,
        "suspensions": run.suspensions,
        "device_seconds": round(run.device_seconds, 2),
        "watt_hours": rounded(run.watt_hours),
        "wish": None if known.state in OVER else wish,
    }


def _columns(points: Sequence[Point]) -> Json:
    return {
        "units": [point.unit for point in points],
        "values": [rounded(point.value) for point in points],
    }


def _begin(history: History | None) -> float:
    """Where the schedule's time begins."""
    bars = history.bars if history else ()
    return round(min((bar.begin for bar in bars), default=0.0), 2)


def _bars(history: History | None, begin: float) -> Json:
    found: Json = {}
    for bar in history.bars if history else ():
        found[f"{bar.epoch} {bar.device}"] = _bar(bar, begin)
    return found


def _bar(bar: Bar, begin: float) -> list[Any]:
    """Device, trial, begin and end in seconds of the schedule; it has no end while it lasts."""
    end = None if bar.end is None else round(bar.end - begin, 2)
    return [bar.device, bar.trial, round(bar.begin - begin, 2), end]


def _device(device: Mapping[str, Any], label: str, holder: Json | None) -> Json:
    return {
        "id": device["id"],
        "label": label,
        "kind": device["kind"],
        "state": "held" if holder else words.idle(device),
        "problem": device["problem"],
        "memory_bytes": device["memory_bytes"],
        "memory_free_bytes": device["memory_free_bytes"],
        "holder": holder,
    }
