"""The figures of ``switch_cost.py`` as text: Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def text(result: dict[str, Any]) -> str:
    parts = [
        _lines(f"- {name}: {_plain(value)}" for name, value in result["setting"].items()),
        "## One trial parks and resumes\n\nMedians; the first time, which takes memory, apart. "
        "Bandwidth is that of the bytes moved, beside a plain copy in the same run.",
        _table(
            "state|tier|park ms|first park ms|resume ms|park GB/s|copy|resume GB/s|copy|"
            "first step ms|step ms",
            [_parked(row) for row in result["park_and_resume"]],
        ),
        "## Two trials take turns on one device\n\nFrom the end of one's last batch to the "
        "beginning of the other's first batch, and to the end of that batch. On disk Hermes "
        "waits until the bytes are safe (fsync, SHA-256); Ray does not.",
        _table(
            "state|by|switches|processes|median ms|longest ms|with first step ms|a later step ms",
            [_switched(row) for row in result["switches"]],
        ),
    ]
    if result["ratios"]:
        parts += [
            "## How many times longer Ray Tune takes\n\nBelow 1 it is faster than we are.",
            _table("state|tier|rival|ratio", [_ratio(row) for row in result["ratios"]]),
        ]
    parts.append(_lines(_target(target) for target in result["targets"]))
    return "\n\n".join(part for part in parts if part)


def _parked(row: dict[str, Any]) -> list[str]:
    moved, copy = row["moved_bytes"], row["copy"]
    rates = ["", "", "", ""]
    if moved:
        out, into = moved / row["park_seconds"], moved / row["resume_seconds"]
        rates = [f"{rate / 1e9:.2f}" for rate in (out, copy["out"], into, copy["in"])]
    return [
        row["state"],
        row["tier"],
        *_ms(row, "park", "first_park", "resume"),
        *rates,
        *_ms(row, "first_step", "step"),
    ]


def _switched(row: dict[str, Any]) -> list[str]:
    return [
        f"{row['size_mb']:g} MB",
        row["by"],
        str(row["switches"]),
        str(row["processes"]),
        *_ms(row, "median", "longest", "with_first_step", "step"),
    ]


def _ratio(row: dict[str, Any]) -> list[str]:
    lost = " (we lose)" if row["ratio"] < 1 else ""
    return [f"{row['size_mb']:g} MB", row["by"], row["rival"], f"{row['ratio']:.1f}{lost}"]


def _target(target: dict[str, Any]) -> str:
    return f"- {target['name']}: {target['measured']:.3g}, {'met' if target['met'] else 'MISSED'}"


def _ms(row: dict[str, Any], *names: str) -> list[str]:
    seconds = [row[f"{name}_seconds"] for name in names]
    return ["" if each is None else f"{1e3 * each:.1f}" for each in seconds]


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {each}" for name, each in value.items())
    return str(value)


def _table(heads: str, rows: Sequence[Sequence[str]]) -> str:
    names = heads.split("|")
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    lines = [names, ["-" * width for width in widths], *rows]
    padded = [map(str.ljust, line, widths) for line in lines]
    return _lines(f"| {' | '.join(line)} |" for line in padded)


def _lines(lines: Iterable[str]) -> str:
    return "\n".join(lines)
