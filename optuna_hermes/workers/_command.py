"""Command lines of the processes that ``optimize`` starts."""

from __future__ import annotations

import os
import sys

_START = (
    "import gc, sys; gc.disable(); sys.path[:] = [each for each in sys.path if each] + [{!r}]; "
    "from optuna_hermes.workers.{} import main; sys.exit(main())"
)


def command(module: str, *arguments: object) -> list[str]:
    """The command line that runs ``main`` of a module in this folder.

    Its garbage collection is off, since imports make many objects that stay: ``main`` enables it.
    Not ``python -m``, which would import from the current folder first.
    """
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return [sys.executable, "-c", _START.format(package, module), *map(str, arguments)]
