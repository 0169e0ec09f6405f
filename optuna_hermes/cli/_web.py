"""``web``: a web page of a study, live or after its end."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optuna_hermes._extras import needed
from optuna_hermes.cli._output import finite, note
from optuna_hermes.cli._overrides import DONE, WHEN, Override, set_override
from optuna_hermes.cli._status import trial_document
from optuna_hermes.cli._studies import (
    OptionalStudyName,
    facts_reader,
    note_storage_alone,
    optional_storage,
    storage_of,
)
from optuna_hermes.cli._upkeep import close_trials
from optuna_hermes.errors import InvalidInputError
from optuna_hermes.view.tables import NEWEST, event_text

if TYPE_CHECKING:
    from optuna_hermes.view._web._app import Actions

PORT = 8470
_OVERRIDES: dict[str, Override | None] = {"hold": "held", "boost": "boosted", "release": None}


def web(
    context: typer.Context,
    storage: Annotated[str | None, optional_storage("Show a study of this storage.")] = None,
    study_name: OptionalStudyName = None,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Listen here; 0.0.0.0 is the whole network.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 is any that is free.")] = PORT,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="OPTUNA_HERMES_TOKEN",
            metavar="TEXT",
            help="What a browser has to show; one is drawn if it is left out.",
        ),
    ] = None,
) -> None:
    """Show a study in the browser, live.

    Curves, the schedule of the devices, and trials to hold, boost or finish; also after the end
    of the study. Without --storage and --study-name only what the broker tells. On 127.0.0.1
    processes of yours need no token; every other user does.

    \b
    Example:
      optuna-hermes web --storage sqlite:///study.db --study-name digits
    """
    with needed("`web` needs uvicorn with starlette", extra="web"):
        from optuna_hermes.view._web._server import serve
    from optuna_hermes.view._web._feed import Feed
    from optuna_hermes.view._web._source import PageReader

    facts = None
    if study_name is None:
        note_storage_alone(context)
    else:
        facts = facts_reader(storage_of(storage, study_name), study_name)
        # Raises for a wrong name before any page is served.
        facts()
    with contextlib.closing(PageReader(study_name, facts)) as reader:
        # Reads the history now, so that the first page is fast.
        reader.look()
        serve(
            Feed(reader.look, reader.disconnect),
            _actions(storage, study_name),
            host=host,
            port=port,
            token=token,
            ready=lambda address: note(f"Open {address} and end with Ctrl-C."),
        )


def _actions(storage: str | None, name: str | None) -> Actions:
    from optuna_hermes.view._web._app import Actions

    def event_log(number: int) -> dict[str, Any]:
        if storage is None or name is None:
            raise InvalidInputError(
                "A trial's event log is in its study's ledger: start with --storage and "
                "--study-name."
            )
        document, _ = trial_document(storage, name, number)
        events = [
            {"at": each["at"], "text": event_text(each["kind"], each["detail"])}
            for each in document["events"][-NEWEST:]
        ]
        left_out = len(document["events"]) - len(events)
        return {**finite(document), "events": events, "events_left_out": left_out}

    def override(verb: str, number: int) -> str:
        if storage is None or name is None:
            raise InvalidInputError(
                "What is done to a trial needs its study: start with --storage and --study-name."
            )
        if verb == "finish":
            values, _ = close_trials(storage, name, [number])
            return f"Finished trial {number} at {values[number]:.4g}."
        new = _OVERRIDES[verb]
        when = set_override(storage, name, [number], new)
        return f"{DONE[new]} trial {number}. {WHEN[when]}".rstrip()

    return Actions(override=override, event_log=event_log)
