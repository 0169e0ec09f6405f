"""The web page's content as plain JSON, from a study's history and a broker's status; no I/O."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msgspec import structs

from optuna_hermes.ledger import outage_phrase
from optuna_hermes.view import formats
from optuna_hermes.view.history import (
    Bar,
    Best,
    Point,
    StudyHistory,
    TrialHistory,
    best_so_far,
    end_of,
    held_epochs,
)
from optuna_hermes.view.picture import ENDED

if TYPE_CHECKING:
    from optuna_hermes.broker._protocol import BrokerStatus, DeviceStatus, StudyStatus, TrialRow
    from optuna_hermes.ledger import TrialRecord

Json = dict[str, Any]

_WITH_PROCESS = ("running", "parked")

# Significant digits of values: more than a screen has pixels.
DIGITS = 6

# More curves cannot be told apart, and take a browser long: trials with a process, and the best.
MOST_CURVES = 500

# More bars are thinner than pixels, and a browser draws each of them.
MOST_BARS = 10_000

# Of a curve, besides the last one: about as many as a chart has pixels across.
MOST_POINTS = 400

# Smaller changes of a slice's times are ignored: the broker's answers take their time.
STEADY_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class PageInput:
    """The data of which a page is made."""

    name: str | None
    named: bool = False  # by the user; otherwise it is a study that the broker serves
    key: str | None = None  # of the study, None if it has none or that is not known
    maximize: bool | None = None  # None if not known
    history: StudyHistory | None = None  # None if its ledger could not be read or there is none
    broker: BrokerStatus | None = None
    silence: str = ""  # why a broker that may train has told no status, else empty
    was_served: bool = False  # true if the last status of a broker had the study
    problem: str | None = None  # why the ledger could not be read
    now: float = 0.0  # Unix time of the broker's status


class PageBuilder:
    """Maker of pages; a part that has not changed since the last page is the same object."""

    def __init__(self) -> None:
        self._columns: dict[int, tuple[tuple[Point, ...], Json]] = {}
        self._path: tuple[Best, ...] = ()
        self._path_version: tuple[str, int, tuple[int, ...]] | None = None
        # Of each device: the epoch of its lease, and the times of its slice.
        self._since: dict[str, tuple[int, tuple[float, float]]] = {}

    def build(self, source: PageInput) -> Json:
        """The page of these data."""
        study, history = served(source), source.history
        trials = _trials(history, study)
        live = _live(source, study, trials)
        bars = history.bars if history else ()
        path = self._path_of(history)
        # The times of bars count from here, which needs fewer digits.
        begin = round(min((bar.begin for bar in bars), default=0.0), 2)
        return {
            "study": _study(source, study),
            "live": live,
            "notes": list(_notes(source, study, is_away=live["is"] == "away")),
            "totals": _totals(source, study),
            "best": _best(source, study, path),
            "trials": trials,
            "curves": self._curves(history, trials, path[-1].trial if path else None),
            "path": [[round(b.device_seconds, 2), rounded(b.value), b.trial] for b in path],
            "begin": begin,
            "bars": _bars(source, begin),
            "devices": self._devices(source, study),
            "key": history.key if history else None,
        }

    def _curves(self, history: StudyHistory | None, trials: Json, best: int | None) -> Json:
        """Units and values of the curves that are drawn, by trial; of ``best`` in any case."""
        found = {}
        reported = [trial for trial in history.trials if trial.points] if history else []
        sign = -1.0 if history and history.maximize else 1.0
        for trial in _drawn_trials(reported, trials, sign, best):
            points, columns = self._columns.get(trial.number, (None, None))
            if points is not trial.points or columns is None:
                # Thousands of curves are thinned out anew only where a value was reported.
                columns = _columns(trial.points)
                self._columns[trial.number] = (trial.points, columns)
            found[str(trial.number)] = columns
        return found

    def _path_of(self, history: StudyHistory | None) -> tuple[Best, ...]:
        """Best so far; the same object if no value was reported, and no trial has failed, since."""
        if history is not None:
            failed = tuple(trial.number for trial in history.trials if trial.state == "failed")
            version = history.key, history.position, failed
            if version != self._path_version:
                self._path_version, self._path = version, best_so_far(history)
        return self._path

    def _devices(self, source: PageInput, study: StudyStatus | None) -> list[Json]:
        """The devices of the broker; their holders are ``own`` if they are trials of ``study``."""
        key = study.key if study else ""
        devices = source.broker.devices if source.broker else ()
        labels = formats.short_devices([device.id for device in devices])
        return [
            {
                "id": device.id,
                "kind": device.kind,
                "problem": device.problem,
                "memory_bytes": device.memory_bytes,
                "memory_free_bytes": device.memory_free_bytes,
                "label": label,
                "state": "held" if device.holder else formats.idle(device),
                "holder": self._holder(device, key, source.now),
            }
            for device, label in zip(devices, labels, strict=True)
        ]

    def _holder(self, device: DeviceStatus, key: str, now: float) -> Json | None:
        holder = device.holder
        if holder is None:
            return None
        # Absolute times change only with a lease: nothing is sent while it lasts.
        times = (now - holder.since_seconds, now + holder.left_seconds)
        epoch, known = self._since.get(device.id, (holder.epoch, times))
        # Each status took a while to arrive, and would move them a little.
        moved = max(abs(a - b) for a, b in zip(times, known, strict=True)) > STEADY_SECONDS
        if moved or epoch != holder.epoch:
            known = times
        self._since[device.id] = holder.epoch, known
        return {
            "own": holder.key == key,
            "study": holder.study,
            "trial": holder.trial,
            "yielding": holder.state == "yielding",
            "since": round(known[0], 2),
            "until": round(known[1], 2),
        }


def served(source: PageInput) -> StudyStatus | None:
    """The study in the broker's status, None if it does not serve it."""
    if source.broker is None:
        return None
    key = source.history.key if source.history else source.key
    if key is not None:
        return source.broker.study(key)
    if source.named:  # another database may have one of its name
        return None
    return next((each for each in source.broker.studies if each.name == source.name), None)


def _study(source: PageInput, study: StudyStatus | None) -> Json:
    others = source.broker.studies if source.broker else ()
    maximize = source.history.maximize if source.history else source.maximize
    return {
        "name": source.name,
        "maximize": study.maximize if study else maximize,
        "policy": study.policy if study else None,
        "host": source.broker.host if source.broker else None,
        "others": [each.name for each in others if each is not study],
        "named": source.named,
        "commands": source.history is not None,
    }


def _live(source: PageInput, study: StudyStatus | None, trials: Json) -> Json:
    """The activity of the study, as a key word and as a text."""
    states = [trial["state"] for trial in trials.values()]
    waiting = sum(state not in ENDED for state in states)
    if study is not None and not study.finished:
        return {"is": "live", "text": "Being suspended" if study.draining else "Training"}
    if study is not None or (states and not waiting):
        return {"is": "ended", "text": "Ended"}
    if source.silence:
        return {"is": "away", "text": "The broker does not answer"}
    if source.broker is None and source.was_served:
        return {"is": "away", "text": "The broker is away"}
    if any(state in _WITH_PROCESS for state in states):
        return {"is": "elsewhere", "text": "Training elsewhere"}
    nobody = source.broker is None and not source.named
    return {"is": "still", "text": "No broker runs on this host" if nobody else "Not running"}


def _notes(source: PageInput, study: StudyStatus | None, *, is_away: bool) -> Iterator[str]:
    """Messages about problems of the study."""
    if source.problem is not None:
        yield source.problem
    if is_away and source.silence:
        yield source.silence
    elif is_away:
        yield (
            "No broker answers on this host. Trials that train go on, and what is shown is from "
            "the ledger; overrides count when it is back."
        )
    if study is None:
        return
    if study.outage_seconds is not None:
        # In whole minutes: a screen reader reads the note again whenever it changes.
        minutes = int(study.outage_seconds / 60)
        since = f" since {formats.plural(minutes, 'minute')}" if minutes else ""
        yield f"The database {outage_phrase(study.outage_reason)}{since}; training goes on."
    if study.no_room:
        yield (
            f"No device has the memory for {formats.ranges(study.no_room)} until another trial "
            "has left it."
        )
    if study.problem:
        yield study.problem
    if study.all_held:
        yield "Every trial that could train is held: release one, and it trains."


def _totals(source: PageInput, study: StudyStatus | None) -> Json:
    # Without leases that have not ended: the page itself counts those up.
    history = source.history
    if study is not None:
        return {
            "device_seconds": round(study.device_seconds - study.held_seconds, 1),
            "watt_hours": rounded(study.watt_hours),
            "switches": study.switches,
            "overhead_seconds": round(sum(study.overhead_seconds.values()), 1),
            # What devices idled is part of the time that is shared, but of no lease.
            "spent_seconds": round(
                study.spent_seconds - study.held_seconds + study.overhead_seconds["idle"], 1
            ),
            "unstarted": study.unstarted,
        }
    return {
        # Only a broker counts these.
        **dict.fromkeys(("switches", "overhead_seconds", "spent_seconds", "unstarted")),
        "device_seconds": round(history.device_seconds, 1) if history else 0.0,
        "watt_hours": rounded(history.watt_hours) if history else None,
    }


def _best(source: PageInput, study: StudyStatus | None, path: Sequence[Best]) -> Json | None:
    """The best value ever reported by a trial that has not failed."""
    if source.history is None:
        return structs.asdict(study.best) if study and study.best else None
    return {"trial": path[-1].trial, "value": path[-1].value} if path else None


# -- trials ---------------------------------------------------------------------------------------


def rounded(value: float | None) -> float | None:
    """A value for JSON, rounded; None for NaN and infinity, which JSON lacks."""
    # Significant digits, not decimals: losses may be of any size.
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{DIGITS}g}")


def _finite(value: float | None) -> float | None:
    """A value for JSON with all of its digits, by which trials are compared; None as above."""
    return None if value is None or not math.isfinite(value) else value


def _trials(history: StudyHistory | None, study: StudyStatus | None) -> Json:
    """Every trial by its number: the broker's data where it has them, else the ledger's."""
    found = {trial.number: _of_ledger(trial) for trial in history.trials} if history else {}
    for row in study.trials if study else ():
        known = found.setdefault(row.number, {})
        # The broker learns later than Optuna of the end of a trial.
        if known.get("state") not in ENDED:
            known |= _of_broker(row)
    return {str(number): found[number] for number in sorted(found)}


def _figures(trial: TrialRow | TrialRecord) -> Json:
    return {
        "slices": trial.slices,
        "suspensions": trial.suspensions,
        "device_seconds": round(trial.device_seconds, 2),
        "watt_hours": rounded(trial.watt_hours),
    }


def _of_broker(row: TrialRow) -> Json:
    return {
        "state": row.state,
        "override": row.override,
        "tier": row.tier,
        "device": row.device,
        "units": row.units,
        "value": _finite(row.value),
        **_figures(row),
    }


def _of_ledger(trial: TrialHistory) -> Json:
    last = trial.points[-1] if trial.points else None
    return {
        "state": trial.state,
        "tier": trial.record.tier if trial.state in _WITH_PROCESS else None,
        "device": None,
        "host": trial.record.host,
        "units": last.unit if last else 0,
        "value": _finite(last.value) if last else None,
        "override": None if trial.state in ENDED else trial.override,
        **_figures(trial.record),
    }


# -- charts ---------------------------------------------------------------------------------------


def _bars(source: PageInput, begin: float) -> Json:
    """Device, trial, begin and end in seconds of the schedule; the end is None while it lasts."""
    history = source.history
    if history is None:
        return {}
    trials = {trial.number: trial for trial in history.trials}
    held = held_epochs(source.broker, history.key)

    def entry(bar: Bar) -> list[Any]:
        end = end_of(bar, trials, held)
        shown = None if end is None else round(end - begin, 2)
        return [bar.device, bar.trial, round(bar.begin - begin, 2), shown]

    return {f"{bar.epoch} {bar.device}": entry(bar) for bar in history.bars[-MOST_BARS:]}


def _drawn_trials(
    reported: Sequence[TrialHistory], trials: Json, sign: float, best: int | None
) -> Sequence[TrialHistory]:
    """The trials whose curves are drawn: all, or of many some.

    ``best`` and those with a process come first, then those with the best last values.
    """
    if len(reported) <= MOST_CURVES:
        return reported

    def rank(trial: TrialHistory) -> tuple[bool, bool, float]:
        value = sign * trial.points[-1].value
        has_process = trials[str(trial.number)]["state"] in _WITH_PROCESS
        # The best value may be an early one: since then its trial may have overfitted.
        return trial.number != best, not has_process, value if math.isfinite(value) else math.inf

    return sorted(sorted(reported, key=rank)[:MOST_CURVES], key=lambda trial: trial.number)


def _columns(points: Sequence[Point]) -> Json:
    """A curve, thinned out if it is long: every second point, every fourth, and the last."""
    # Powers of two: a new point then changes the end of the curve, not all of it.
    stride = 1
    while len(points) > stride * MOST_POINTS:
        stride *= 2
    shown = points if stride == 1 else (*points[:-1:stride], points[-1])
    return {
        "units": [point.unit for point in shown],
        "values": [rounded(point.value) for point in shown],
    }
