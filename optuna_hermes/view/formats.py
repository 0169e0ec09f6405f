"""Formats of figures and texts for people; pure functions."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from optuna_hermes.broker._protocol import DeviceStatus

SILENT = "The broker does not answer: trials may train."

ELSEWHERE = (
    "This study may train: a broker of another runtime directory ($OPTUNA_HERMES_RUNTIME_DIR), or "
    "of another user, has it."
)

STATES = ("running", "parked", "stored", "pending", "done", "failed")
"""The states of trials in the order of a life cycle: they are counted and sorted by it."""

_BARS = "▁▂▃▄▅▆▇█"
# Ratio of the largest to the smallest value from which on a sparkline is logarithmic: losses fall
# fast and then slowly, and both phases can be seen.
_LOG_FROM = 3.0

# Those of terminals (C0, C1), and marks that turn the direction of writing; not \\t and \\n.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """A text with its control characters escaped, so that a study's name cannot steer a terminal.

    Example:
        >>> printable("a\\x1b[2Jb")
        'a\\\\x1b[2Jb'
    """
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def all_printable(value: Any) -> Any:
    """A document, or a status, in which every text is ``printable``."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {all_printable(key): all_printable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [all_printable(each) for each in value]
    if isinstance(value, msgspec.Struct):
        return msgspec.convert(all_printable(msgspec.to_builtins(value)), type(value))
    return value


def number(value: float | None, digits: int = 4) -> str:
    """A value with a few significant digits; a dash for none.

    Example:
        >>> number(0.123456), number(None), number(float("nan"))
        ('0.1235', '-', 'nan')
    """
    return "-" if value is None else f"{value:.{digits}g}"


def duration(seconds: float) -> str:
    """Seconds, in a readable unit.

    Example:
        >>> duration(0.42), duration(75), duration(7384)
        ('0.4 s', '1:15 min', '2:03 h')
    """
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d} h"


def size(n_bytes: float) -> str:
    """Bytes, in a readable unit.

    Example:
        >>> size(12), size(2_500_000), size(3 * 1024**4)
        ('12 B', '2.4 MiB', '3072.0 GiB')
    """
    if round(n_bytes) < 1000:
        return f"{n_bytes:.0f} B"
    for unit in ("KiB", "MiB"):
        n_bytes /= 1024
        if round(n_bytes, 1) < 1000:
            return f"{n_bytes:.1f} {unit}"
    return f"{n_bytes / 1024:.1f} GiB"


def energy(watt_hours: float | None) -> str:
    """Watt-hours, in a readable unit; a dash for none.

    Example:
        >>> energy(0.42), energy(75), energy(512.3), energy(999.6), energy(None)
        ('0.420 Wh', '75.0 Wh', '512 Wh', '1.00 kWh', '-')
    """
    if watt_hours is None:
        return "-"
    units = ["GWh", "MWh", "kWh", "Wh"]
    while watt_hours >= 999.5 and len(units) > 1:  # which three digits would write as 1000
        watt_hours /= 1000
        units.pop()
    # Less would be written with an exponent.
    shown = watt_hours if watt_hours >= 1e-4 else 0.0
    return f"{f'{shown:#.3g}'.rstrip('.')} {units[-1]}"


_POWER = {"going": "being powered down", "off": "powered down", "coming": "being powered up"}


def idle(device: DeviceStatus) -> str:
    """The state of a device without a holder, or the reason why it is granted to no trial."""
    return device.problem or _POWER.get(device.power, "free" if device.healthy else "not healthy")


def plural(count: int, noun: str, nouns: str | None = None) -> str:
    """A count with its noun.

    Example:
        >>> plural(1, "trial"), plural(3, "trial"), plural(2, "switch", "switches")
        ('1 trial', '3 trials', '2 switches')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {nouns or noun + 's'}"


def ranges(numbers: Iterable[int]) -> str:
    """Numbers in order, with three or more successive ones as a range.

    Example:
        >>> ranges([5, 1, 2, 3, 9, 8])
        '1-3, 5, 8, 9'
    """
    spans: list[list[int]] = []
    for value in sorted(set(numbers)):
        if spans and value == spans[-1][-1] + 1:
            spans[-1].append(value)
        else:
            spans.append([value])
    return ", ".join(
        f"{span[0]}-{span[-1]}" if len(span) > 2 else ", ".join(map(str, span)) for span in spans
    )


def parameters(values: Mapping[str, Any]) -> str:
    """Hyper-parameters as ``name=value``.

    Example:
        >>> parameters({"lr": 0.001234567, "kind": "adam"})
        'lr=0.001235, kind=adam'
    """
    return ", ".join(
        f"{name}={number(value) if isinstance(value, float) else value}"
        for name, value in values.items()
    )


def short_devices(ids: Sequence[str]) -> list[str]:
    """Names of devices for people: UUIDs are cut to the shortest unique beginning.

    Example:
        >>> short_devices(["GPU-5c2f0a11-aaaa", "GPU-5c2f0a12-bbbb", "cpu:0"])
        ['GPU-5c2f0a11', 'GPU-5c2f0a12', 'cpu:0']
    """
    for length in range(8, 48, 2):
        cut = [id_ if len(id_) <= length + 4 else id_[: length + 4].rstrip("-") for id_ in ids]
        if len(set(cut)) == len(set(ids)):
            return cut
    return list(ids)


def sparkline(values: Sequence[float | None], width: int, *, log: bool = True) -> str:
    """A curve as a line of at most ``width`` bars; a dot for what is not finite.

    With ``log`` positive values over a wide range are shown by their logarithms.

    Example:
        >>> sparkline((3.0, None, 2.0), 9), sparkline((100.0, 10.0, 1.0), 9)
        ('█·▁', '█▅▁')
    """
    last = len(values) - 1
    if last >= width:
        values = [values[round(i * last / (width - 1))] for i in range(width)]
    shown = [None if value is None or not math.isfinite(value) else value for value in values]
    finite = [value for value in shown if value is not None]
    if not finite:
        return "·" * len(shown)
    if log and min(finite) > 0 and max(finite) > _LOG_FROM * min(finite):
        shown = [None if value is None else math.log(value) for value in shown]
        finite = [math.log(value) for value in finite]
    # Halved first, since the difference of diverged values may overflow to infinity.
    low = min(finite) / 2
    span = max(finite) / 2 - low
    shares = [None if v is None else (v / 2 - low) / span if span else 0.0 for v in shown]
    return "".join("·" if v is None else _BARS[round(v * (len(_BARS) - 1))] for v in shares)
