"""``broker``: run this host's broker, or end the one that runs."""

from __future__ import annotations

from typing import Annotated

import typer

from optuna_hermes.cli._optimize import Devices, PowerDown, PowerUp
from optuna_hermes.cli._output import note
from optuna_hermes.cli._studies import seconds
from optuna_hermes.errors import BrokerError, BrokerSilentError


def broker(
    devices: Devices = "auto",
    idle_seconds: Annotated[float | None, seconds("End after so long without a client.")] = None,
    log_json: Annotated[
        bool, typer.Option("--log-json", help="Log one JSON object a line.")
    ] = False,
    metrics: Annotated[
        str | None,
        typer.Option(
            envvar="OPTUNA_HERMES_METRICS",
            metavar="[ADDRESS:]PORT",
            help="Serve figures for Prometheus there, on 127.0.0.1 unless told otherwise.",
        ),
    ] = None,
    power_down_command: PowerDown = None,
    power_up_command: PowerUp = None,
    stop: Annotated[bool, typer.Option("--stop", help="End the broker that runs.")] = False,
) -> None:
    """Be the broker of this host, in the foreground.

    You need not call it: `optimize` starts a broker when there is none. It is for systemd units,
    containers, and hosts whose devices shall stay with one broker. It logs to standard error.

    \b
    Example:
      optuna-hermes broker --devices cpu:2
    """
    if stop:
        _stop()
        return
    from optuna_hermes.broker.__main__ import run_broker
    from optuna_hermes.broker._power_commands import power_commands
    from optuna_hermes.broker._server._logs import start_logging

    power = power_commands(power_down_command, power_up_command)
    start_logging(as_json=log_json)
    run_broker(devices, idle_seconds=idle_seconds, metrics=metrics, power=power)


def _stop() -> None:
    from optuna_hermes.broker import _protocol as wire
    from optuna_hermes.broker import connect_if_any

    connection = connect_if_any("viewer")
    if connection is None:
        note("No broker runs on this host.")
        return
    pid = connection.welcome.pid
    # It hangs up when it agrees, and says why when it does not.
    connection.send(wire.Quit())
    try:
        answer = connection.receive()
    except BrokerSilentError:
        raise
    except BrokerError:
        note(f"The broker (process {pid}) has ended.")
        return
    finally:
        connection.close()
    reason = answer.reason if isinstance(answer, wire.Refused) else repr(answer)
    raise BrokerError(f"{reason} Stop what uses it first; `optuna-hermes status` shows it.")
