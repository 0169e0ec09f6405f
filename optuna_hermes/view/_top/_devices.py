"""The devices of ``top``: their holders, and a strip of their past leases; no I/O."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from rich.style import Style
from rich.text import Text

from optuna_hermes.broker._protocol import DeviceStatus, HolderStatus
from optuna_hermes.view import formats
from optuna_hermes.view._top._text import (
    COOL,
    DIM,
    FAINT,
    GROUND,
    INK,
    RAISED,
    STATE_COLOURS,
    WIDE,
)
from optuna_hermes.view.history import Bar
from optuna_hermes.view.picture import Picture, Power

_TRIAL_COLOURS = (
    *("#5f8fbd", "#6fa87d", "#bd9d5e", "#9583c4", "#c07d70"),
    *("#559f9b", "#ad7c9f", "#889c5d", "#7783c2", "#b08a60"),
)
# Stands for a trial that is shown without a number, for it is new or of another study: None stands
# for no trial.
UNNUMBERED = -1
_PARTS = " ▏▎▍▌▋▊▉█"


# -- past leases ---------------------------------------------------------------------------------


class Past:
    """Leases by device, study and epoch; those older than ``seconds`` are forgotten."""

    # The epochs of studies of two databases may be equal.

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._leases: dict[str, dict[tuple[str, int], Bar]] = defaultdict(dict)

    def see(self, picture: Picture) -> None:
        """Add the present leases of a picture."""
        for device in picture.devices:
            if (holder := device.holder) is not None:
                # A later picture, or the ledger, says more exactly when the lease has ended.
                begin = picture.at - holder.since_seconds
                bar = Bar(device.id, holder.trial, begin, picture.at, holder.epoch)
                self._leases[device.id][holder.key, holder.epoch] = bar
        since = picture.at - self.seconds
        for id_, bars in self._leases.items():
            kept = {lease: b for lease, b in bars.items() if (b.end or picture.at) > since}
            self._leases[id_] = kept

    def read(self, bars: Iterable[Bar], picture: Picture) -> None:
        """Add ended leases of the study of a picture, on its host.

        They take the place of what pictures showed of them less exactly.
        """
        for bar in bars:
            on, _, id_ = bar.device.partition("/")
            if on != picture.host or bar.end is None or bar.end < picture.at - self.seconds:
                continue
            self._leases[id_][picture.key, bar.epoch] = bar

    def cells(self, device: str, key: str, now: float, width: int) -> list[int | None]:
        """The trial with most of each part of the time, None where there was no lease.

        Trials of other studies than ``key`` are ``UNNUMBERED``.
        """
        step = self.seconds / width
        begin = now - self.seconds
        shares: list[dict[int, float]] = [defaultdict(float) for _ in range(width)]
        for (study, _), bar in self._leases[device].items():
            end = bar.end or now
            trial = UNNUMBERED if bar.trial is None or study != key else bar.trial
            first = max(0, int((bar.begin - begin) / step))
            last = min(width - 1, int((end - begin) / step))
            for cell in range(first, last + 1):
                left, right = begin + cell * step, begin + (cell + 1) * step
                shares[cell][trial] += min(end, right) - max(bar.begin, left)
        # Free for most of the time, it is shown as free.
        return [
            None if sum(share.values()) < step / 2 else max(share, key=share.__getitem__)
            for share in shares
        ]


# -- the lines -----------------------------------------------------------------------------------


def device_lines(picture: Picture, past: Past, now: float, width: int) -> Text:
    """Each device with its holder, and a strip of its leases in the last minutes."""
    parts = _device_columns(picture, width)
    left = sum(size + 1 for _, size, _ in parts) + 1
    strip = max(0, width - left - 1)
    lines = Text(no_wrap=True, end="")
    lines.append(" ")
    for name, size, _ in parts:
        is_right = name in ("trial", "memory", "power")
        lines.append((name.rjust(size) if is_right else name.ljust(size)) + " ", DIM)
    begin, end = f"{past.seconds / 60:.0f} min ago", "now"
    room = strip - len(begin) - len(end)
    lines.append(begin + " " * room + end if room > 0 else " " * strip, DIM)
    for device in picture.devices:
        lines.append("\n ")
        for _, _, text in parts:
            # Slices are counted down from when the picture was taken.
            lines.append_text(text(device, now - picture.at))
            lines.append(" ")
        lines.append_text(_strip(past.cells(device.id, picture.key, now, strip) if strip else []))
    return lines


_Part = tuple[str, int, Callable[[DeviceStatus, float], Text]]


def _device_columns(picture: Picture, width: int) -> list[_Part]:
    """Names, widths and cells of what fits; memory and power only if they are known."""
    wide = width >= WIDE
    ids = [each.id for each in picture.devices]
    shown = ids if wide else [_short(each, 9) for each in ids]
    if len(set(shown)) < len(set(ids)):
        shown = formats.short_devices(ids)
    names = dict(zip(ids, shown, strict=True))
    # 40 are those of a GPU's whole UUID.
    id_ = max(6, min(max(map(len, names.values()), default=6), 40))
    bar = 10 if wide else 5
    parts: list[_Part] = [
        ("device", id_, lambda d, _: Text(_short(names[d.id], id_).ljust(id_), INK)),
        ("trial", 5, lambda d, _: _holder(d.holder, picture.key)),
        ("state     slice", bar + 18, lambda d, age: _state(d, age, bar)),
    ]
    if any(each.memory_bytes is not None for each in picture.devices):
        parts.append(("memory", 14, lambda d, _: _memory(d)))
    if picture.power:
        parts.append(("power", 6, lambda d, _: _power(picture.power.get(d.id))))
    # A number that is cut would be another one.
    while len(parts) > 2 and sum(size + 1 for _, size, _ in parts) + 1 > width:
        parts.pop()
    return parts


def _short(id_: str, width: int) -> str:
    return id_ if len(id_) <= width else id_[: width - 1] + "…"


def _holder(holder: HolderStatus | None, key: str) -> Text:
    if holder is None:
        return Text(" " * 5)
    # The table below has the trials of one study, which another's would be taken for.
    if holder.key != key:
        return Text("other", FAINT)
    name = "new" if holder.trial is None else str(holder.trial)
    return Text(name.rjust(5), trial_colour(holder.trial))


def _state(device: DeviceStatus, age: float, width: int) -> Text:
    """The state of a device's holder and its slice; or the reason why it has none, cut."""
    if device.holder is None:
        return Text(_short(formats.idle(device), width + 18).ljust(width + 18), DIM)
    state = Text(device.holder.state.ljust(10), STATE_COLOURS.get(device.holder.state, DIM))
    return state.append_text(_slice(device.holder, age, width))


def _slice(holder: HolderStatus, age: float, width: int) -> Text:
    """The rest of a slice, as a bar and in seconds."""
    if holder.slice_seconds <= 0:
        return Text(" " * (width + 8))
    left = max(0.0, holder.left_seconds - age)
    eighths = round(8 * width * min(1.0, left / holder.slice_seconds))
    bar = "█" * (eighths // 8) + (_PARTS[eighths % 8] if eighths % 8 else "")
    text = Text(bar.ljust(width), f"{COOL} on {RAISED}")
    return text.append(formats.duration(left).rjust(8), DIM)


def _memory(device: DeviceStatus) -> Text:
    total, free = device.memory_bytes, device.memory_free_bytes
    if total is None or free is None:
        return Text(" " * 14)
    used = (total - free) / 1024**3
    return Text(f"{used:.1f}/{total / 1024**3:.0f} GiB".rjust(14), INK)


def _power(power: Power | None) -> Text:
    watts = None if power is None else power.watts
    return Text(("-" if watts is None else f"{watts:.0f} W").rjust(6), INK)


def trial_colour(number: int | None) -> str:
    """The fixed colour of a trial."""
    return DIM if number is None else _TRIAL_COLOURS[number % len(_TRIAL_COLOURS)]


def _strip(cells: Sequence[int | None]) -> Text:
    """Blocks of one colour, with the trial's number where it fits."""
    strip, begin = Text(), 0
    while begin < len(cells):
        end = begin
        while end < len(cells) and cells[end] == cells[begin]:
            end += 1
        strip.append_text(_block(cells[begin], end - begin))
        begin = end
    return strip


def _block(trial: int | None, width: int) -> Text:
    if trial is None:
        return Text("·" * width, FAINT)
    label = "" if trial == UNNUMBERED else str(trial)
    label = label if len(label) < width else ""
    colour = FAINT if trial == UNNUMBERED else trial_colour(trial)
    return Text(label.ljust(width), Style(color=GROUND, bgcolor=colour, bold=True))
