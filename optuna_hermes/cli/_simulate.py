"""``simulate``: replay of recorded trainings under other policies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optuna_hermes.cli._output import complain, libraries_to_stderr, note, show, show_json
from optuna_hermes.cli._studies import (
    Json,
    OptionalStudyName,
    finite,
    optional_storage,
    source_of,
    storage_of,
    study_and_ledger,
)
from optuna_hermes.errors import ExitStatus, InvalidInputError
from optuna_hermes.view.formats import plural, ranges

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optuna_hermes.simulator import CurveSet

DEFAULT_POLICIES = "hermes,asha,asha-stop,median-stop"
JOB_POLICIES = "fifo,qssf"
DEFAULT_BUDGET = 40.0
DEFAULT_TRIALS = 100
DEFAULT_SWITCH_COST = 0.005
MOST_DEVICES = 100_000
MOST_SEEDS = 10_000
_MOST_SEED = 2**32 - 1
"""The largest seed of NumPy's older generators, which Optuna's samplers draw from."""


def simulate(
    context: typer.Context,
    curves: Annotated[
        list[Path] | None,
        typer.Argument(metavar="CURVES...", help="Curve sets in .npz files.", show_default=False),
    ] = None,
    jobs: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Jobs of a cluster instead: CSV with submitted, seconds, devices, group, user.",
        ),
    ] = None,
    storage: Annotated[
        str | None, optional_storage("Replay a study of it instead of files.")
    ] = None,
    study_name: OptionalStudyName = None,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Policies, with commas; module:CLASS or FILE.py:CLASS is one of your own. "
            f"Else {DEFAULT_POLICIES}, or {JOB_POLICIES} with --jobs.",
        ),
    ] = None,
    devices: Annotated[
        int, typer.Option(min=1, max=MOST_DEVICES, metavar="G", help="How many devices.")
    ] = 1,
    trials: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Of recorded trials: so many drawn of each set, or all if there are fewer; else "
            f"{DEFAULT_TRIALS}, and all of a study.",
        ),
    ] = None,
    seeds: Annotated[
        str, typer.Option(metavar="S", help="Draws of trials: seeds 0 to S-1, or a list: 2,3.")
    ] = "1",
    switch_cost: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            callback=finite,
            metavar="F",
            help="Of a device that changes trials, as a fraction of a unit; else "
            f"{DEFAULT_SWITCH_COST:g}.",
        ),
    ] = None,
    sampler: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Let this sampler of Optuna propose trials instead of drawing N.",
        ),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(
            callback=finite,
            metavar="B",
            help=f"With --sampler: so many full trainings; else {DEFAULT_BUDGET:g}.",
        ),
    ] = None,
    devices_per_host: Annotated[
        int | None,
        typer.Option(min=1, metavar="H", help="With --jobs: of each host; else 8."),
    ] = None,
    slice_seconds: Annotated[
        float | None,
        typer.Option(
            callback=finite,
            metavar="S",
            help="With --jobs: how often to interrupt; else never, srtf alone.",
        ),
    ] = None,
    json: Json = False,
) -> int:
    """Replay recorded trainings under several policies.

    Curve sets are files, or a study's own ledger: what would round-robin have done with my study?
    For each seed the trials stand in random order. fifo is always simulated too, and with neither
    --sampler nor --jobs round-robin and the oracle, which knows the best trial beforehand. With
    --sampler a study is replayed as it would go: what trains next depends on what was reported.
    With --jobs the trials are jobs of a cluster that come, and take so long on so many devices;
    only srtf interrupts them, and qssf learns from those that are over. docs/which-policy.md says
    what to make of the tables.

    \b
    Example:
      optuna-hermes simulate examples/curves/*.npz
      optuna-hermes simulate examples/curves/*.npz --policy hermes,las --devices 4 --seeds 10
      optuna-hermes simulate examples/curves/*.npz --sampler TPESampler --devices 4
      optuna-hermes simulate --storage sqlite:///study.db --study-name digits --policy slaq
      optuna-hermes simulate --jobs jobs.csv --policy fifo,qssf,sjf --devices 64
    """
    # NumPy and rich: imported here, so that other verbs start faster.
    from optuna_hermes.cli import _simulations
    from optuna_hermes.view import simulation

    if budget is not None and sampler is None:
        raise InvalidInputError(
            f"--budget needs --sampler but got {budget:g} alone: add --sampler TPESampler."
        )
    if jobs is None and (devices_per_host is not None or slice_seconds is not None):
        raise InvalidInputError(
            "--devices-per-host and --slice-seconds need --jobs: add --jobs FILE or leave them out."
        )
    if jobs is not None and (curves or study_name is not None or sampler is not None):
        raise InvalidInputError(
            "--jobs goes without curves, --study-name and --sampler: name one of them only."
        )
    # From $OPTUNA_STORAGE it is meant for other verbs.
    if study_name is None and source_of(context, "storage") == "COMMANDLINE":
        raise InvalidInputError(
            f"--storage needs --study-name but got {storage!r} alone: add --study-name NAME, or "
            "leave it out."
        )
    if trials is not None and not (jobs is None and sampler is None):
        raise InvalidInputError(
            f"--trials goes without --jobs and --sampler but got {trials}: leave it out."
        )
    if jobs is not None and switch_cost is not None:
        raise InvalidInputError(
            f"--switch-cost goes without --jobs but got {switch_cost:g}: leave it out."
        )
    switch_cost = DEFAULT_SWITCH_COST if switch_cost is None else switch_cost
    defaults = DEFAULT_POLICIES if jobs is None else JOB_POLICIES
    names = (defaults if policy is None else policy).split(",")
    draws = _seeds(seeds)
    sets, without = ([], 0) if jobs is not None else _sets(curves or [], storage, study_name)
    with libraries_to_stderr():
        if jobs is not None:
            hosts = (devices, devices_per_host or 8)
            document = _simulations.of_jobs(jobs, names, hosts, slice_seconds, draws)
            view = simulation.jobs_view
        elif sampler is not None:
            budget = DEFAULT_BUDGET if budget is None else budget
            document = _simulations.with_sampler(
                sets, names, sampler, budget, devices, switch_cost, draws
            )
            view = simulation.loop_view
        else:
            everything = DEFAULT_TRIALS if study_name is None else len(sets[0].recordings)
            n_trials = trials or everything
            document = _simulations.of_lists(sets, names, n_trials, devices, switch_cost, draws)
            view = simulation.simulation_view
    if study_name is not None:
        document["settings"]["left_out"] = without
    elif left_out := document["settings"].get("left_out"):
        note(f"{plural(left_out, 'job')} left out that had no device or took no time.")
    if refused := document["settings"].get("refused"):
        note(f"{plural(refused, 'job')} left out that want more than {plural(devices, 'device')}.")
    if json:
        show_json(document)
    else:
        show(view(document))
    for problem in document["failed"].values():
        complain(problem, ExitStatus.BAD_INPUT)
    return ExitStatus.BAD_INPUT if document["failed"] else 0


def _seeds(text: str) -> Sequence[int]:
    parts = [part.strip() for part in text.split(",")]
    # Python refuses to read numbers of very many digits.
    numbers = [int(each) if each.isdecimal() and len(each) <= 10 else -1 for each in parts]
    if len(numbers) == 1 and 1 <= numbers[0] <= MOST_SEEDS:
        return range(numbers[0])
    different = len(set(numbers)) == len(numbers)
    if len(numbers) == 1 or not different or not 0 <= min(numbers) <= max(numbers) <= _MOST_SEED:
        raise InvalidInputError(
            f"--seeds must be a number, 1 to {MOST_SEEDS}, or a list of different ones of 0 to "
            f"{_MOST_SEED} but got {text!r}: `--seeds 2` means 0,1."
        )
    return numbers


def _sets(
    curves: Sequence[Path], storage: str | None, study_name: str | None
) -> tuple[list[CurveSet], int]:
    """The curve sets, and the number of a study's trials that are left out."""
    from optuna_hermes.replay import check_names, curve_set_of, incomplete_trials, read_curve_set

    if bool(curves) == (study_name is not None):
        raise InvalidInputError(
            "Name either files with curves, or a study: --storage URL --study-name NAME."
        )
    if study_name is None:
        sets = [read_curve_set(path) for path in curves]
        check_names(sets)
        return sets, 0
    with study_and_ledger(storage_of(storage, study_name), study_name) as (study, ledger):
        found = curve_set_of(study, ledger)
        cut, left_out = incomplete_trials(study, ledger)
    if cut:
        note(
            f"{plural(len(cut), 'trial')} of {len(found.recordings)} not trained to the end "
            f"({ranges(cut)}): replayed as far as trained."
        )
    if left_out:
        note(
            f"{plural(len(left_out), 'trial')} left out ({ranges(left_out)}) that failed, or have "
            "no recorded value."
        )
    return [found], len(left_out)
