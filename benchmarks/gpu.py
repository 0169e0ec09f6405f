"""All that only a GPU can tell, in order of importance, in under 40 minutes.

    python benchmarks/gpu.py                       # writes gpu.json and gpu.md in results/
    python benchmarks/gpu.py --parts exact,switch  # these parts; others stay as they are there
    python benchmarks/gpu.py --dry-run --out DIR   # all, small, on the simulated accelerator

It is run in a checkout, by a Python that has a torch for the GPU and what
``pip install -e ".[lightning,huggingface]"`` installs. Every part is a process of its own, with a
time limit. A part that fails, or runs past its limit, is a line in the result that says so; what it
has found before stays. Exit status 1 if there is such a line.

The simulated accelerator is that of the tests, and is compiled for the first run: g++, gcc and
ninja have to be there. Its figures mean nothing but that the part runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MINUTES = 40


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of the benchmark."""

    seconds: int  # its time limit
    # ``module:function``; the function gets a ``Setting`` and a callable that adds a row.
    call: str
    title: str  # as the page has it
    note: str  # what the rows mean


PARTS = {
    "device": Part(
        seconds=60,
        call="_gpu_device:describe",
        title="The device",
        note="As torch and the driver describe it.",
    ),
    "exact": Part(
        seconds=480,
        call="_gpu_exact:measure",
        title="Exactness",
        note="Trainings that are suspended, against the same one that never is, with deterministic "
        "algorithms. Tier *none* is that training once more: where it differs, nothing can be said "
        "of the others. Recurrent layers with dropout are trained without cuDNN, too, which keeps "
        "a generator of its own; with it they are expected to differ where a checkpoint is read.",
    ),
    "switch": Part(
        seconds=480,
        call="_gpu_memory:measure_switches",
        title="Switch costs",
        note="One trial, in one process, into a tier and back. Rates are of the bytes moved, "
        "beside those of one pinned copy of as many bytes in the same run.",
    ),
    "turns": Part(
        seconds=180,
        call="_gpu_study:take_turns",
        title="Two trials take turns",
        note="`optimize()` with a broker: from the end of one trial's last batch to the beginning "
        "of the other's first.",
    ),
    "contexts": Part(
        seconds=90,
        call="_gpu_memory:measure_contexts",
        title="Memory of contexts",
        note="What a process takes of the device beside what torch has reserved, after what it has "
        "used, and how much all of several such processes take.",
    ),
    "saving": Part(
        seconds=180,
        call="_gpu_memory:measure_saving",
        title="Saving a unit",
        note="For how long a training stands still for the copy from which a thread writes, beside "
        "a copy into pageable memory.",
    ),
    "study": Part(
        seconds=420,
        call="_gpu_study:race",
        title="The quickstart's study",
        note="The digits, in a loop of one's own. Overhead is device time outside of batches.",
    ),
    "live": Part(
        seconds=240,
        call="_gpu_study:keep_alive",
        title="More live trials than fit",
        note="Trials in turns, of which a part of the device has room for a part, and nothing else "
        "is shown to the broker; the others wait in host memory or on disk. Each looks at its end "
        "if all its memory is as it has left it.",
    ),
    "beside": Part(
        seconds=150,
        call="_gpu_sharing:beside_each_other",
        title="Two trials beside each other",
        note="Steps a second of both together: in turns, as time slices give the device, and at "
        "the same time, as the driver shares it.",
    ),
    "ddp": Part(
        seconds=120,
        call="_gpu_sharing:stop_ranks",
        title="Ranks that stop together",
        note="Ranks only queue the sum of their gradients, and must stop at the same batch. NCCL "
        "needs a GPU for each.",
    ),
    "nvml": Part(
        seconds=60,
        call="_gpu_driver:read_counters",
        title="NVML's counters",
        note="What the driver answers of each device, and what a poll of the broker takes.",
    ),
    "mig": Part(
        seconds=60,
        call="_gpu_driver:look_for_slices",
        title="MIG",
        note="Whether devices are cut into slices, and if so, what a trial sees of one.",
    ),
    "hooks": Part(
        seconds=60,
        call="_gpu_driver:measure_hooks",
        title="Hooks",
        note="What a batch costs a Lightning training when there is nothing to do.",
    ),
}
"""In order of importance: where the time is up, the last ones are missing."""


def main() -> int:
    options = _options()
    if options.part:
        return _be_part(options)
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "gpu.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    if found and found["dry_run"] != options.dry_run:
        print(f"{file} is of {'a dry' if found['dry_run'] else 'no dry'} run: give another --out.")
        return 2
    parts = found.get("parts", {})
    ends = time.monotonic() + 60 * options.minutes
    for name in options.parts:
        left = min(ends - time.monotonic(), options.seconds or PARTS[name].seconds)
        print(f"{name}: at most {left:.0f} s", file=sys.stderr, flush=True)
        parts[name] = _run(name, left, dry=options.dry_run)
        # After each: whatever ends this process, what was found is kept.
        ordered = {each: parts[each] for each in PARTS if each in parts}
        result = {"command": _command(), "dry_run": options.dry_run, "parts": ordered}
        file.write_text(json.dumps(result, indent=1) + "\n")
        _write_page(options.out / "gpu.md", result)
    print((options.out / "gpu.md").read_text())
    return int(any(parts[name]["error"] for name in options.parts))


def _run(name: str, seconds: float, *, dry: bool) -> dict[str, Any]:
    """Run one part in a process of its own; its rows, and its error if it had one."""
    began = time.monotonic()
    error: str | None = None
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        rows, log = Path(folder, "rows"), Path(folder, "log")
        if seconds <= 0:
            error = "the time was up before it began"
        else:
            command = [sys.executable, __file__, "--part", name, "--out", folder]
            with log.open("wb") as output:
                child = subprocess.Popen(
                    command + ["--dry-run"] * dry,
                    stdout=output,
                    stderr=output,
                    env=_environment(folder, dry=dry),
                    start_new_session=True,
                )
            try:
                if child.wait(seconds):
                    error = _last_line(log) or f"it ended with status {child.returncode}"
            except subprocess.TimeoutExpired:
                error = f"it ran past its limit of {seconds:.0f} s"
            finally:
                _end(child)
        lines = rows.read_text().splitlines() if rows.exists() else []
        if error and log.exists():
            print(log.read_text(errors="replace")[-4000:], file=sys.stderr, flush=True)
    took = round(time.monotonic() - began, 1)
    return {"seconds": took, "error": error, "rows": [json.loads(line) for line in lines]}


def _end(child: subprocess.Popen[bytes]) -> None:
    """End what is left of a part: the process, and all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _environment(folder: str, *, dry: bool) -> dict[str, str]:
    from _gpu_device import build_nvml

    here = [str(ROOT / each) for each in ("", "tests", "benchmarks")]
    paths = [*here, os.environ.get("PYTHONPATH", "")]
    found = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # deterministic algorithms need it
        "OPTUNA_HERMES_RUNTIME_DIR": folder,
    }
    if dry:
        found["LD_LIBRARY_PATH"] = str(build_nvml(Path(folder)))
        found["OMP_NUM_THREADS"] = "1"
    return found


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


def _be_part(options: argparse.Namespace) -> int:
    """Be the process of one part: write a line of JSON for each row."""
    from _gpu_device import open_device

    module, _, function = PARTS[options.part].call.partition(":")
    setting = open_device(options.out, dry=options.dry_run)
    with (options.out / "rows").open("a") as file:

        def add(**row: Any) -> None:
            file.write(json.dumps(row) + "\n")
            file.flush()

        measure: Callable[..., None] = getattr(import_module(module), function)
        measure(setting, add)
    return 0


# -- the page ----------------------------------------------------------------------------------


def _write_page(path: Path, result: dict[str, Any]) -> None:
    lines = ["# On a GPU", "", f"By `{result['command']}`.", ""]
    if result["dry_run"]:
        lines[2] += " A dry run on the simulated accelerator: no figure here is one of a device."
    for name, found in result["parts"].items():
        part = PARTS[name]
        lines += [f"## {part.title}", "", f"{part.note} It took {found['seconds']:.0f} s.", ""]
        if found["error"]:
            lines += [f"**Failed**: {found['error']}", ""]
        if found["rows"]:
            lines += [*_table(found["rows"]), ""]
    path.write_text("\n".join(lines))


def _table(rows: Sequence[dict[str, Any]]) -> list[str]:
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_cell(row.get(name)) for name in names] for row in rows]
    heads = [name.replace("_", " ") for name in names]
    return [_line(heads), _line(["---"] * len(names)), *map(_line, cells)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/")


# -- the command line --------------------------------------------------------------------------


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", type=_names, default=list(PARTS), help="names, with commas")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for all of them")
    parser.add_argument("--seconds", type=float, help="for each, in place of its own limit")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of gpu.json and gpu.md")
    parser.add_argument("--dry-run", action="store_true", help="small, on the simulated device")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.dry_run and options.out == RESULTS:
        parser.error("--dry-run must have an --out of its own: its figures mean nothing")
    return options


def _names(text: str) -> list[str]:
    names = text.split(",")
    if not set(names) <= set(PARTS):
        raise argparse.ArgumentTypeError(f"parts are {', '.join(PARTS)} but got {text!r}")
    return names


def _command() -> str:
    return " ".join(["python", "benchmarks/gpu.py", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
