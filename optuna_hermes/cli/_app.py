"""The command line's verbs and entry point: an error becomes one line and an exit status."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from optuna_hermes import __version__
from optuna_hermes.cli import (
    _broker,
    _doctor,
    _launch,
    _optimize,
    _optuna_verbs,
    _overrides,
    _plot,
    _quickstart,
    _simulate,
    _status,
    _top,
    _upkeep,
    _web,
)
from optuna_hermes.cli._output import complain, end_unprinted
from optuna_hermes.cli._studies import PROGRAM
from optuna_hermes.errors import (
    DatabaseOutageError,
    ExitStatus,
    HermesError,
    InvalidInputError,
    UnprintedError,
    refuse_undecoded,
)

# Typer vendors click or uses the installed one, by version: this is the base class either way.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]

# This package's own verbs, in the order of the help; every other one is Optuna's.
VERBS: dict[str, Callable[..., Any]] = {
    "optimize": _optimize.optimize,
    "quickstart": _quickstart.quickstart,
    "simulate": _simulate.simulate,
    "status": _status.status,
    "top": _top.top,
    "web": _web.web,
    "plot": _plot.plot,
    "hold": _overrides.hold,
    "boost": _overrides.boost,
    "release": _overrides.release,
    "finish": _upkeep.finish,
    "policy": _overrides.policy,
    "gc": _upkeep.gc,
    "broker": _broker.broker,
    "doctor": _doctor.doctor,
}

app = typer.Typer(
    name=PROGRAM,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=f"Optuna's own verbs work too: {', '.join(sorted(_optuna_verbs.KNOWN))}.",
)
for _name, _verb in VERBS.items():
    app.command(_name)(_verb)
app.add_typer(_launch.launch, name="launch")
GROUPS = ("launch",)


def run(argv: Sequence[str]) -> int:
    """Run one command line, given without the program's name, and return its exit status."""
    try:
        for argument in argv:
            refuse_undecoded(argument, "An argument")
        # Typer would refuse Optuna's verbs as unknown ones.
        if _optuna_verbs.is_for_optuna(argv, (*VERBS, *GROUPS)):
            return _optuna_verbs.run(argv)
        return int(app(args=list(argv), prog_name=PROGRAM, standalone_mode=False) or 0)
    except _UsageError as error:
        return complain(_usage(error), ExitStatus.BAD_INPUT)
    except InvalidInputError as error:
        return complain(str(error), ExitStatus.BAD_INPUT)
    except UnprintedError as error:
        return end_unprinted(error, ExitStatus.FAILED)
    except DatabaseOutageError as error:
        return complain(str(error), ExitStatus.SUSPENDED)
    except HermesError as error:
        return complain(str(error), ExitStatus.FAILED)
    except typer.Abort:
        return ExitStatus.INTERRUPTED


def _usage(error: Any) -> str:
    # Errors of the parser itself have no context.
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else PROGRAM
    message = str(error.format_message()).strip()
    return f"{message.rstrip('.')}. See `{path} --help`."


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"{PROGRAM} {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Never kill a trial, pause it: Optuna studies with more live trials than devices.

    \b
    Start with:
      optuna-hermes quickstart
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
