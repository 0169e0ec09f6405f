"""``launch``: start ``optimize`` on the hosts of an engine, and ask about them."""

from __future__ import annotations

import os
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optuna_hermes.cli._output import note, show, show_json
from optuna_hermes.cli._studies import PROGRAM, Json, source_of
from optuna_hermes.errors import InvalidInputError
from optuna_hermes.view.tables import hosts_view

if TYPE_CHECKING:
    from optuna_hermes.launch import Job, Launcher

Arguments = Annotated[
    list[str],
    typer.Argument(metavar="-- OPTIMIZE ARGUMENTS", help="As `optimize` has them, after `--`."),
]
Name = Annotated[
    str | None, typer.Option(metavar="NAME", help="Of the job; else the study's name.")
]
Hosts = Annotated[int, typer.Option(min=1, max=10_000, metavar="N", help="How many hosts.")]
Gpus = Annotated[int, typer.Option(min=0, max=1000, metavar="N", help="GPUs of each host.")]
Cpus = Annotated[
    int,
    typer.Option(min=0, max=10_000, metavar="N", help="Cores of each host; without GPUs, slots."),
]
Grace = Annotated[
    int,
    typer.Option(min=1, max=86400, metavar="S", help="From the signal to suspend to the end."),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print what would be handed over, and start nothing.")
]
Launched = Annotated[str, typer.Argument(metavar="NAME", help="Of a launch.")]

launch = typer.Typer(
    rich_markup_mode=None,
    help="Start `optimize` on the hosts of SLURM, Kubernetes or Ray, and ask about them.",
)


@launch.callback(invoke_without_command=True)
def _launch(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@launch.command()
def slurm(
    arguments: Arguments,
    name: Name = None,
    hosts: Hosts = 1,
    gpus: Gpus = 0,
    cpus: Cpus = 0,
    time: Annotated[
        str, typer.Option(metavar="TIME", help="Limit of each job, as `sbatch --time`.")
    ] = "",
    sbatch: Annotated[
        list[str] | None,
        typer.Option(metavar="OPTION", help="One more line `#SBATCH OPTION`; may be repeated."),
    ] = None,
    grace: Grace = 120,
    dry_run: DryRun = False,
) -> None:
    """Start an array of jobs, a host each, that go back into the queue when their time is over.

    \b
    Example:
      optuna-hermes launch slurm --hosts 3 --gpus 1 --time 4:00:00 --sbatch=--partition=gpu -- \\
          train.py:objective --storage postgresql+psycopg://user@db/optuna \\
          --study-name digits --n-trials 64 --checkpoint-dir /shared/digits
    """
    from optuna_hermes.launch import launcher

    job = _job(
        arguments, name, hosts, gpus, cpus, grace, time_limit=time, extra=tuple(sbatch or ())
    )
    _start(launcher("slurm"), job, dry_run)


@launch.command()
def kubernetes(
    arguments: Arguments,
    image: Annotated[
        str, typer.Option(metavar="IMAGE", help="With this package and the objective.")
    ],
    name: Name = None,
    hosts: Hosts = 1,
    gpus: Gpus = 0,
    cpus: Cpus = 0,
    claim: Annotated[
        str, typer.Option(metavar="CLAIM", help="A volume's claim, for checkpoints of all pods.")
    ] = "",
    namespace: Annotated[
        str, typer.Option(metavar="NAME", help="Else that of kubectl's context.")
    ] = "",
    grace: Grace = 120,
    dry_run: DryRun = False,
) -> None:
    """Start an Indexed Job, a pod for each host. The storage's URL becomes a secret.

    \b
    Example:
      optuna-hermes launch kubernetes --image registry/train:1 --hosts 3 --gpus 1 \\
          --claim checkpoints -- train:objective \\
          --storage postgresql+psycopg://user@db/optuna --study-name digits --n-trials 64
    """
    from optuna_hermes.launch import launcher

    job = _job(arguments, name, hosts, gpus, cpus, grace, elsewhere=True)
    _start(launcher("kubernetes", image=image, claim=claim, namespace=namespace), job, dry_run)


@launch.command()
def ray(
    arguments: Arguments,
    name: Name = None,
    hosts: Hosts = 1,
    gpus: Gpus = 0,
    cpus: Cpus = 0,
    address: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Of the cluster, as for `ray.init`.")
    ] = "auto",
    grace: Grace = 120,
    dry_run: DryRun = False,
) -> None:
    """Start an actor for each host, each on a node of its own.

    \b
    Example:
      optuna-hermes launch ray --hosts 3 --gpus 1 -- /shared/train.py:objective \\
          --storage postgresql+psycopg://user@db/optuna --study-name digits --n-trials 64 \\
          --checkpoint-dir /shared/digits
    """
    from optuna_hermes.launch import launcher

    job = _job(arguments, name, hosts, gpus, cpus, grace)
    _start(launcher("ray", address=address), job, dry_run)


@launch.command()
def status(name: Launched, json: Json = False) -> None:
    """Show what the hosts of a launch do, in the engine's view.

    \b
    Example:
      optuna-hermes launch status digits
    """
    from optuna_hermes.launch import kept, launcher

    launched = kept(name)
    hosts = launcher(launched.launcher).hosts(launched)
    if json:
        show_json({**asdict(launched), "hosts": [asdict(host) for host in hosts]})
    elif hosts:
        show(hosts_view([asdict(host) for host in hosts]))
    else:
        show(f"{launched.launcher} knows no host of {name!r} any more: `{PROGRAM} status` with "
             "--storage shows the study.")  # fmt: skip


@launch.command()
def stop(name: Launched) -> None:
    """Suspend all trials of a launch and end its hosts; the same `launch` goes on later.

    \b
    Example:
      optuna-hermes launch stop digits
    """
    from optuna_hermes.launch import kept, launcher

    launched = kept(name)
    launcher(launched.launcher).stop(launched)
    note(f"Asked {launched.launcher} to stop {name!r}: `{PROGRAM} launch status {name}` shows it.")


@launch.command()
def logs(name: Launched) -> None:
    """Print what the hosts of a launch have written, each line with its host.

    \b
    Example:
      optuna-hermes launch logs digits
    """
    from optuna_hermes.launch import kept, launcher

    launched = kept(name)
    nothing = True
    for line in launcher(launched.launcher).logs(launched):
        show(line)
        nothing = False
    if nothing:
        place = f" in {launched.folder}" if launched.folder else ""
        note(f"No output of {name!r} was found{place}.")


def _start(launcher: Launcher, job: Job, dry_run: bool) -> None:
    from optuna_hermes.launch import record

    if dry_run:
        show(launcher.render(job).rstrip("\n"))
        return
    with record(job.name) as keep:
        launched = launcher.start(job)
        keep(launched)
    note(
        f"Started {job.name!r} ({launcher.name} {launched.id}). Next:\n"
        f"  {PROGRAM} launch status {job.name}\n"
        f"  {PROGRAM} launch logs {job.name}\n"
        f"  {PROGRAM} launch stop {job.name}"
    )


def _job(
    arguments: list[str],
    name: str | None,
    hosts: int,
    gpus: int,
    cpus: int,
    grace: int,
    *,
    elsewhere: bool = False,
    **others: Any,
) -> Job:
    """Check the arguments of ``optimize`` here, and take those out that are fields of a job.

    Raises:
        InvalidInputError: `optimize` would refuse them, or they contradict the launcher's.
    """
    from optuna_hermes.cli._app import app
    from optuna_hermes.launch import Job
    from optuna_hermes.ledger import is_database

    # As the parser of ``optimize`` itself reads them.
    command = typer.main.get_command(app).commands["optimize"]  # type: ignore[attr-defined]
    context: typer.Context = command.make_context(f"{PROGRAM} optimize", list(arguments))
    _check(context, elsewhere)
    given = context.params
    storage = given["storage"]
    if (elsewhere or hosts > 1) and not given["ledger"] and not is_database(storage):
        raise InvalidInputError(
            "Hosts share a study that is in no database, as in a journal or behind a gRPC proxy, "
            "by a database for its ledger: add --ledger URL after the `--`."
        )
    return Job(
        name=name or given["study_name"],
        arguments=tuple(_without(arguments, "--storage", "--devices", "--checkpoint-dir")),
        storage=storage,
        devices="" if source_of(context, "devices") == "DEFAULT" else given["devices"],
        checkpoint_dir=given["checkpoint_dir"] or "",
        password=os.environ.get("PGPASSWORD", ""),  # hosts may not have this environment
        hosts=hosts,
        gpus=gpus,
        cpus=cpus,
        grace_seconds=grace,
        **others,
    )


def _check(context: typer.Context, elsewhere: bool) -> None:
    """Refuse what each host has from its launcher or would refuse, as far as it can be told here.

    Raises:
        InvalidInputError: it has or would.
    """
    from optuna_hermes.broker._devices._source import check_devices
    from optuna_hermes.broker._power_commands import commands_for
    from optuna_hermes.policies import ENERGY, make_policy
    from optuna_hermes.suspend._tiers._remote import check_url, is_url
    from optuna_hermes.workers._settings import OptimizeSettings

    for name in ("grace", "requeue"):
        if source_of(context, name) == "COMMANDLINE":
            raise InvalidInputError(
                f"Hosts have --grace and --requeue from `launch` but got --{name} after the `--`: "
                "leave it out there, and give --grace before the `--`."
            )
    given = context.params
    settings = {
        each.name: given[each.name] for each in fields(OptimizeSettings) if each.name in given
    }
    if elsewhere and is_url(place := settings["checkpoint_dir"] or ""):
        check_url(place, here=False)  # the hosts need its store's package, this one does not
        del settings["checkpoint_dir"]
    OptimizeSettings(**settings)
    policy = given["policy"]
    if not elsewhere or ":" not in policy.removeprefix(ENERGY):
        make_policy(policy)
    # A login node may lack the program that its hosts have.
    commands_for(policy, given["power_down_command"], given["power_up_command"], here=False)
    check_devices(given["devices"])
    file = given["objective"].rpartition(":")[0]
    if not elsewhere and file.endswith(".py") and not Path(file).exists():
        raise InvalidInputError(f"No file {file!r} here: hosts start where this command is run.")


def _without(arguments: list[str], *options: str) -> list[str]:
    kept, skip = [], False
    for each in arguments:
        if skip or each in options:
            skip = not skip
        elif each.partition("=")[0] not in options:
            kept.append(each)
    return kept
