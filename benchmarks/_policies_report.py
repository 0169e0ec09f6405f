"""The figures of ``policies.py`` as text: Markdown tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from _policies_studies import DEFAULTS
from _policies_studies import EXPLANATION as STUDIES_EXPLANATION

from optuna_hermes.replay import Result, tabulate
from optuna_hermes.replay._studies import TIMES as STUDY_TIMES

OURS = "hermes"
CLAIRVOYANT = ("oracle", "oracle-breadth")
EXPLANATION = """\
How many times as fast as `fifo`: geometric means over sets of the mean over seeds. best: the trial
that ends best has finished; top 3: one of the best three has; near: some value is within 1 % of the
span from the median first value to the best final one; auc: area under the regret of the best value
seen. median set, worst set and families: of best. killed: how often the best trial was stopped for
ever; it counts as the latest end of a trial where no device idles and every unit is a switch.
`hermes` against: how many times as long as `hermes` the policy needs. **Bold: better than
`hermes`.** The oracles know how every training ends: they are a bound, no rivals."""
TIMES = {"best": "best_seconds", "top 3": "top3_seconds", "near": "near_seconds", "auc": "auc"}


def figures(results: Sequence[Result]) -> list[dict[str, Any]]:
    """A dictionary for each policy, the soonest at the best trial first, clairvoyants last."""
    rows = tabulate(results)
    (ours,) = (row for row in rows if row["policy"] == OURS)
    by_set = _by_set(results)
    found = [_figures(row, ours, by_set) for row in rows]
    return sorted(found, key=lambda row: row["policy"] in CLAIRVOYANT)


def _figures(
    row: dict[str, Any], ours: dict[str, Any], by_set: dict[str, dict[str, float]]
) -> dict[str, Any]:
    against_fifo = {
        name: by_set["fifo"][name] / seconds for name, seconds in by_set[row["policy"]].items()
    }
    worst = min(against_fifo, key=against_fifo.__getitem__)
    return {
        "policy": row["policy"],
        "fifo": {head: row["ratios"]["fifo"][name] for head, name in TIMES.items()},
        "median_set": statistics.median(against_fifo.values()),
        "worst_set": {"name": worst, "ratio": against_fifo[worst]},
        "round_robin": row["ratios"].get("round-robin", {}).get("best_seconds"),
        "ours": {head: row[name] / ours[name] for head, name in TIMES.items()},
        "killed_best": row["killed_best"],
        "families": row["families"],
        "sets": against_fifo,
    }


def _by_set(results: Sequence[Result]) -> dict[str, dict[str, float]]:
    """By policy and set: mean seconds over seeds until the best trial has finished."""
    seconds: dict[str, dict[str, list[float]]] = {}
    for result in results:
        sets = seconds.setdefault(result.policy, {})
        sets.setdefault(result.curve_set, []).append(result.metrics.best_seconds)
    return {
        policy: {name: statistics.fmean(each) for name, each in sets.items()}
        for policy, sets in seconds.items()
    }


def text(result: dict[str, Any]) -> str:
    """All of it."""
    setting = result["setting"]
    parts = [
        "# Policies compared on recorded learning curves",
        _lines(f"- {name}: {value}" for name, value in setting.items()),
        EXPLANATION,
    ]
    for block in result["blocks"]:
        heading = (
            f"## {count(block['devices'], 'device')}, a switch costs {100 * block['cost']:g} % of "
            f"a unit ({count(block['seeds'], 'seed')})"
        )
        parts += [heading, _block(block["rows"])]
    if result["targets"]:
        parts += ["## Targets", _lines(_target(each) for each in result["targets"])]
    return "\n\n".join(parts) + "\n"


def studies_text(result: dict[str, Any]) -> str:
    """All of it, for studies with a sampler and a budget."""
    parts = [
        "# Policies compared in studies with a sampler and a budget",
        _lines(f"- {name}: {value}" for name, value in result["setting"].items()),
        STUDIES_EXPLANATION,
    ]
    for block in result["blocks"]:
        cost = f"{block['opening']:g} {'unit' if block['opening'] == 1 else 'units'}"
        parts += [
            f"## {count(block['devices'], 'device')}, {block['budget']:g} full trainings, "
            f"opening a trial costs {cost}",
            _studies_table(block["rows"]),
        ]
    return "\n\n".join(parts) + "\n"


def _studies_table(rows: Sequence[dict[str, Any]]) -> str:
    heads = ["policy", "sampler", "any", "fin", "finished", "opened"]
    heads += [f"as fast, {name[:3]} {name[3:]} %" for name in STUDY_TIMES]
    ours = next((row for row in rows if (row["policy"], row["sampler"]) == DEFAULTS), None)

    def line(row: dict[str, Any]) -> list[str]:
        cells = [row["policy"], row["sampler"]]
        for name in ("any", "fin"):
            better = ours is not None and row[name] < ours[name]
            cells.append(_bold(f"{100 * row[name]:.2f} %", better))
        cells += [f"{row[name]:.1f}" for name in ("finished", "opened")]
        for name in STUDY_TIMES:
            fast = row["as_fast"].get(name)
            better = ours is not None and fast is not None and fast > ours["as_fast"][name]
            cells.append("" if fast is None else _bold(f"{fast:.2f}", better))
        return cells

    return _table(heads, [line(row) for row in rows])


def _bold(text: str, better: bool) -> str:
    return f"**{text}**" if better else text


def _block(rows: Sequence[dict[str, Any]]) -> str:
    (ours,) = (row for row in rows if row["policy"] == OURS)
    families = list(ours["families"])
    heads = ["policy", *TIMES, "median set", "worst set", "x round-robin", "killed"]
    heads += ["`hermes` against (best, near, auc)", *families]
    return _table(heads, [_line(row, ours, families) for row in rows])


def _line(row: dict[str, Any], ours: dict[str, Any], families: Sequence[str]) -> list[str]:
    rival = row["policy"] not in (OURS, *CLAIRVOYANT)

    def cell(value: float | None, own: float | None) -> str:
        if value is None or own is None:
            return ""
        return _bold(f"{value:.2f}", rival and value > own)

    against = ", ".join(f"{row['ours'][name]:.2f}" for name in ("best", "near", "auc"))
    return [
        row["policy"],
        *(cell(row["fifo"][name], ours["fifo"][name]) for name in TIMES),
        cell(row["median_set"], ours["median_set"]),
        cell(row["worst_set"]["ratio"], ours["worst_set"]["ratio"]),
        cell(row["round_robin"], ours["round_robin"]),
        f"{100 * row['killed_best']:.0f} %",
        "" if row["policy"] == OURS else against,
        *(cell(row["families"][name], ours["families"][name]) for name in families),
    ]


def _target(target: dict[str, Any]) -> str:
    return f"- {target['name']}: {target['measured']:.2f}, {'met' if target['met'] else 'MISSED'}"


def count(number: int, noun: str) -> str:
    """``1 seed``, ``2 seeds``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return _lines(f"| {' | '.join(line)} |" for line in lines)


def _lines(lines: Iterable[str]) -> str:
    return "\n".join(lines)
