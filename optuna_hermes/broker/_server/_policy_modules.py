"""Policies of users' own in a broker, which imports each module once, for the studies of all."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Sequence

from optuna_hermes.errors import InvalidInputError
from optuna_hermes.policies import ENERGY, make_policy

_INSTALLED = (
    os.path.join(os.path.dirname(os.__file__), ""),
    *(f"{os.sep}{each}-packages{os.sep}" for each in ("site", "dist")),
)
_BEFORE = frozenset(sys.modules)
"""Modules that no policy of a user's has imported."""

_versions: dict[str, tuple[int, int] | None] = {}
"""Of the file of each user's module, as it was when the module was first seen here."""


def try_policy(name: str, folders: Sequence[str], *, again: bool = False) -> None:
    """Make a policy; its module may be in these folders.

    Args:
        again: the process that wants it has had it here before.

    Raises:
        HermesError: it cannot be made, or not of the modules that its own process would import.
    """
    look_in(folders)
    if again:
        make_policy(name)
        return
    _refuse_other_modules(name, folders)
    try:
        make_policy(name)
    finally:  # also after an error, which another project's module may have led to
        _refuse_other_modules(name, folders)


def look_in(paths: Sequence[str]) -> None:
    """Import from these folders too, after all others: they hide no module of this process."""
    for path in paths:
        if path not in sys.path:
            sys.path.append(path)
            importlib.invalidate_caches()


def _refuse_other_modules(policy: str, folders: Sequence[str]) -> None:
    """Refuse a policy that would not get the modules that its user's process imports now.

    Here a module of that name may be from another file, or an earlier version of the file. To
    import it again could fail, or change another study's policy.
    """
    place, colon, _ = policy.removeprefix(ENERGY).rpartition(":")
    folder, file = os.path.split(os.path.abspath(place))
    beside, own = ([folder], file[:-3]) if file.endswith(".py") else ([], "")
    for name, path in _modules_of_users() if colon else ():
        if name == own:  # the file itself is run anew each time
            continue
        version = _version(path)
        known = _versions.setdefault(path, version)
        bases = [os.path.join(each, *name.split(".")) for each in (*folders, *beside)]
        places = (f"{base}{end}" for base in bases for end in (f"{os.sep}__init__.py", ".py"))
        found = next(filter(os.path.isfile, places), None)
        # Editable installs may be in none of the folders.
        same = found or name.partition(".")[0] == place.partition(".")[0]
        if found and os.path.realpath(found) != path:
            problem = f"has {name!r} from {path}, not from {found}"
        elif same and version not in (known, None):
            problem = f"has imported {path} before its last change"
        else:
            continue
        raise InvalidInputError(
            f"A broker imports a module once, for all its studies, but this one {problem}: run "
            "this command again once no study has used it for 30 s, when it ends by itself, or "
            "after `optuna-hermes broker --stop`."
        )


def _modules_of_users() -> Iterator[tuple[str, str]]:
    """Modules that are neither installed nor of this package, with their files."""
    for name, module in sys.modules.copy().items():
        path = getattr(module, "__dict__", {}).get("__file__")
        own = name not in _BEFORE and name.partition(".")[0] != "optuna_hermes"
        if own and isinstance(path, str) and not any(each in path for each in _INSTALLED):
            yield name, os.path.realpath(path)


def _version(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
