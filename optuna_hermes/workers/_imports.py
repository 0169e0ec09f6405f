"""Imports of a process that runs the user's files beside libraries.

Python looks for every module in the folder of a script first. A file ``queue.py`` there, which
is meant for a package or is a script itself, would be what torch gets when it imports ``queue``.
"""

from __future__ import annotations

import site
import sys
import sysconfig
from collections.abc import Sequence
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
"""Files that import what the user named."""


class LibrariesFirst(MetaPathFinder):
    """Finds what libraries import among libraries, and what the user imports as Python does.

    Args:
        own: name of the objective's file: its own imports of that name mean something else.
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


def is_library(name: str) -> bool:
    """Whether an import of this name can mean a library, or a part of Python."""
    return name in sys.stdlib_module_names or _find_in_libraries(name) is not None


def _find_in_libraries(name: str) -> ModuleSpec | None:
    folders = [each for each in sys.path if each.startswith(_FOLDERS)]
    spec = PathFinder.find_spec(name, folders)
    # A folder without modules is no reason to pass over the user's file.
    return spec if spec is not None and spec.loader is not None else None


def _asked_by_library() -> bool:
    """Whether the import in progress is a statement in a library's file.

    What a library imports by ``importlib.import_module`` was mostly named by its user.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_machinery(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return False
    file = frame.f_code.co_filename
    if any(each in file for each in _FOR_USERS) or frame.f_globals["__name__"] == "importlib":
        return False
    return file.startswith((*_FOLDERS, _OURS, "<frozen"))


def _is_machinery(file: str) -> bool:
    return file == __file__ or file.startswith("<frozen importlib")
