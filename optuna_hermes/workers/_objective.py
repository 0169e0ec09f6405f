"""Transfer of an objective from the caller's process into a worker's."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from optuna_hermes.errors import HermesError, ObjectiveError
from optuna_hermes.workers._imports import is_library
from optuna_hermes.workers._once import call_alike
from optuna_hermes.workers._preload import function_of

Objective = Callable[..., Any]


def pack(objective: Objective | str, why: str = "") -> bytes | str:
    """An objective in the form that the fork server receives: a function is pickled by value.

    A ``FILE.py:NAME`` stays as it is. ``why`` is the reason why this process cannot be forked.

    Raises:
        ObjectiveError: there is no such file, or the function holds something that cannot be sent
            to another process.
    """
    if isinstance(objective, str):
        _split(objective)
        return objective
    try:
        return bytes(cloudpickle.dumps(objective))
    except Exception as error:
        raise ObjectiveError(
            f"The objective must be picklable{why and f', since {why},'} but {error}: create what "
            "it cannot carry (locks, open files, a device's memory) inside of it."
        ) from error


def file_of(objective: bytes | str) -> Path | None:
    """The file of a ``FILE.py:NAME``; None for other objectives."""
    place = objective.rpartition(":")[0] if isinstance(objective, str) else ""
    return Path(place) if place.endswith(".py") else None


def arguments(objective: bytes | str) -> list[str]:
    """The ``sys.argv`` for the import of an objective in another process."""
    if isinstance(objective, bytes):
        return sys.argv
    # These are of this process's own script: what else is imported, and may parse them, gets none.
    place = objective.rpartition(":")[0]
    return sys.argv if _is_script(place) else [place]


def _is_script(place: str) -> bool:
    """True if a file or a module is this process's own script."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is None:
        return False
    path = Path(script).resolve()
    if place.endswith(".py"):
        return Path(place).resolve() == path
    package = path.parent if path.stem == "__main__" else path.with_suffix("")
    names = place.split(".")
    return list(package.parts[-len(names) :]) == names


def unpack(packed: bytes | str, study_name: str) -> Objective:
    """The objective itself, with everything it imports.

    What is drawn meanwhile, such as a split of data without a seed or the name of a folder, is the
    same in each process of a study, and another in other studies.

    Raises:
        ObjectiveError: there is no such file, module or function, or importing it fails.
    """
    # The study's key and seed are known only once its database is open, and that is meanwhile.
    seed = zlib.crc32(study_name.encode(errors="surrogatepass"))
    if isinstance(packed, bytes):
        return call_alike(seed, _load_value, packed)
    place, name = _split(packed)
    if place.endswith(".py"):
        module = call_alike(seed, _load_file, Path(place))
    else:
        module = call_alike(seed, _load_module, place)
    objective = getattr(module, name, None)
    if not callable(objective):
        known = ", ".join(sorted(_functions(module))[:8]) or "none"
        raise ObjectiveError(f"No function {name!r} in {place} (there: {known}).")
    return objective  # type: ignore[no-any-return]


def _load_value(packed: bytes) -> Objective:
    try:
        objective: Objective = cloudpickle.loads(packed)  # our own parent sent it
    except HermesError:
        raise
    except (Exception, SystemExit) as error:
        raise ObjectiveError(
            f"The objective cannot be loaded in a worker: {error!r}. What it imports must be "
            "importable in another process too."
        ) from error
    _fill_main(objective)
    return objective


def _fill_main(objective: Objective) -> None:
    """Put what the objective's script or notebook has defined where pickle looks for it by name."""
    function = function_of(objective)
    if function is not None and function.__module__ == "__main__":
        main = vars(sys.modules["__main__"])
        for name, value in function.__globals__.items():
            main.setdefault(name, value)


def _split(target: str) -> tuple[str, str]:
    """The two sides of ``FILE.py:NAME``; a missing file is reported here, before any import."""
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise ObjectiveError(f"An objective is FILE.py:NAME or module:NAME but got {target!r}.")
    if place.endswith(".py") and not Path(place).is_file():
        raise ObjectiveError(f"No file {place!r}: give the path of the objective's file.")
    return place, name


def _load_file(path: Path) -> ModuleType:
    sys.path.insert(0, str(path.parent.absolute()))
    # A file called random.py must not stand for the library in everything that is imported next.
    name = f"objective_{path.stem}" if is_library(path.stem) else path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ObjectiveError(f"{str(path)!r} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except HermesError as error:
        raise ObjectiveError(f"Importing {path}: {error}") from error
    except (Exception, SystemExit) as error:
        raise ObjectiveError(f"Importing {path} raised {error!r}: mend that first.") from error
    return module


def _functions(module: ModuleType) -> list[str]:
    """The public functions that a module defines itself."""
    found = inspect.getmembers(module, inspect.isfunction)
    own = (name for name, each in found if each.__module__ == module.__name__)
    return [name for name in own if not name.startswith("_")]


def _load_module(name: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except HermesError as error:
        raise ObjectiveError(f"Importing module {name!r}: {error}") from error
    except (Exception, SystemExit) as error:
        raise ObjectiveError(f"Importing module {name!r} raised {error!r}.") from error
