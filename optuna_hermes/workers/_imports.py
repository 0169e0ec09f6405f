"""Import rules of a process that runs the user's files beside libraries.

Python searches the folder of a script first, for every module. A user's ``queue.py`` there would
replace the standard library's ``queue`` when torch imports it.
"""

from __future__ import annotations

import contextlib
import site
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import FrameType, ModuleType

_FOLDERS = (
    *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")),
    *site.getsitepackages(),
    site.getusersitepackages(),
)
_OURS = str(Path(__file__).parents[1])
_FOR_USERS = ("cloudpickle", "_objective.py")
"""Files whose imports are named by the user."""


class LibrariesFirst(MetaPathFinder):
    """Finder that resolves imports of libraries among libraries, and the user's as Python does.

    In the objective's file, which has the name ``own``, an import of it means a library.
    """

    def __init__(self, own: str | None = None) -> None:
        self._own = own

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See ``MetaPathFinder``; None leaves the search to the next finder."""
        if path is not None or (fullname != self._own and not _asked_by_library()):
            return None
        return _find_in_libraries(fullname)


class _AfterImport(MetaPathFinder):
    """Finder that has a function called with a module, right after that was imported."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._then = then
        self._looks = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See ``MetaPathFinder``."""
        if fullname != self._name or self._looks:
            return None
        self._looks = True
        try:
            finders = (getattr(each, "find_spec", None) for each in sys.meta_path)  # six's had none
            specs = (find(fullname, path, target) for find in finders if find is not None)
            spec = next((each for each in specs if each is not None), None)
        finally:
            self._looks = False
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_call(module: ModuleType) -> None:
                load(module)
                if self in sys.meta_path:  # what was looked for in time may be loaded later
                    self._then(module)

            vars(spec.loader)["exec_module"] = load_and_call
        return spec


@contextlib.contextmanager
def after_import(name: str, then: Callable[[ModuleType], None]) -> Iterator[None]:
    """Have a function called with a module once code in here imports it as the first."""
    finder = _AfterImport(name, then)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the code has set others
            sys.meta_path.remove(finder)


def is_library(name: str) -> bool:
    """True if an import of this name can mean a library, or a part of Python."""
    return name in sys.stdlib_module_names or _find_in_libraries(name) is not None


def _find_in_libraries(name: str) -> ModuleSpec | None:
    # Python passes over what is no text, such as a pathlib.Path.
    entries: list[object] = [*sys.path]
    folders = [each for each in entries if isinstance(each, str) and each.startswith(_FOLDERS)]
    spec = PathFinder.find_spec(name, folders)
    # A folder without modules (a namespace package) must not hide the user's file.
    return spec if spec is not None and spec.loader is not None else None


def _asked_by_library() -> bool:
    """True if the import in progress is a statement in a library's file."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_machinery(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return False
    file = frame.f_code.co_filename
    # Names that a library gives to importlib.import_module mostly come from its user.
    if any(each in file for each in _FOR_USERS) or frame.f_globals["__name__"] == "importlib":
        return False
    return file.startswith((*_FOLDERS, _OURS, "<frozen"))


def _is_machinery(file: str) -> bool:
    return file == __file__ or file.startswith("<frozen importlib")
