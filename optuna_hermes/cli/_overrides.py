"""``hold``, ``boost``, ``release`` and ``policy``: overrides while a study runs."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from optuna_hermes.cli._output import note, show, show_json
from optuna_hermes.cli._studies import Json, Storage, StudyName, study_and_ledger
from optuna_hermes.view.formats import plural, ranges

Override = Literal["held", "boosted"]

WHEN = {
    "applied": "",
    "soon": "Hosts that train the study, if any do, follow within seconds.",
    "later": "No broker of yours serves the study now: it counts from its next start.",
}
DONE = {"held": "Held", "boosted": "Boosted", None: "Released"}

Trials = Annotated[
    list[int],
    typer.Argument(metavar="TRIAL...", min=0, help="Numbers of trials.", show_default=False),
]


def hold(storage: Storage, study_name: StudyName, trials: Trials, json: Json = False) -> None:
    """Give trials no device until they are released.

    One that trains is suspended now, and nothing of it is lost. Held trials stay held when the
    study is stopped and run again. A study of which only held trials are left is suspended.

    \b
    Example:
      optuna-hermes hold --storage sqlite:///study.db --study-name digits 3 7
      optuna-hermes release --storage sqlite:///study.db --study-name digits 3 7
    """
    _override(storage, study_name, trials, "held", as_json=json)


def boost(storage: Storage, study_name: StudyName, trials: Trials, json: Json = False) -> None:
    """Give trials the next devices, whatever the policy says.

    Each keeps its device from slice to slice until it has ended, or is released. No slice of
    another trial is cut short for it.

    \b
    Example:
      optuna-hermes boost --storage sqlite:///study.db --study-name digits 3
      optuna-hermes release --storage sqlite:///study.db --study-name digits 3
    """
    _override(storage, study_name, trials, "boosted", as_json=json)


def release(storage: Storage, study_name: StudyName, trials: Trials, json: Json = False) -> None:
    """Let the policy decide about held or boosted trials again.

    \b
    Example:
      optuna-hermes release --storage sqlite:///study.db --study-name digits 3 7
    """
    _override(storage, study_name, trials, None, as_json=json)


def policy(
    storage: Storage,
    study_name: StudyName,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="As `optimize --policy`.", show_default=False)
    ],
    json: Json = False,
) -> None:
    """Let another policy decide about a study that runs.

    It decides from the next slice on, and until `optimize` ends. What the one before it had
    remembered is forgotten.

    \b
    Example:
      optuna-hermes policy --storage sqlite:///study.db --study-name digits round-robin
    """
    from optuna_hermes.policies import make_policy
    from optuna_hermes.upkeep import change_policy

    # Raises for a policy that does not exist, before anything is opened.
    make_policy(name)
    with study_and_ledger(storage, study_name) as (study, _):
        known = change_policy(study, name)
    if json:
        show_json({"study": study_name, "policy": name})
    else:
        show(f"Policy {name} decides from the next slice on.")
    if known:
        note(known)


def _override(
    storage: str, study_name: str, trials: list[int], override: Override | None, *, as_json: bool
) -> None:
    when = set_override(storage, study_name, trials, override)
    if as_json:
        served = None if when == "soon" else when == "applied"  # by other hosts it may be
        show_json({"trials": sorted(set(trials)), "override": override, "served": served})
        return
    count = plural(len(set(trials)), "trial")
    show(f"{DONE[override]} {count}: {ranges(trials)}.")
    if WHEN[when]:
        show(WHEN[when])


def set_override(storage: str, name: str, trials: list[int], override: Override | None) -> str:
    """Set the override of trials; return since when it counts, a key of ``WHEN``.

    Raises:
        InvalidInputError: one of the trials does not exist, or has ended; nothing is changed.
        StorageError: as ``study_and_ledger``.
    """
    from optuna_hermes import _optuna
    from optuna_hermes.broker._protocol import SetOverrides
    from optuna_hermes.upkeep import want

    with study_and_ledger(storage, name) as (study, ledger):
        key = _optuna.study_key(study)
        message = SetOverrides(study=key, numbers=tuple(trials), override=override)
        return want(study, ledger, message)
