"""Reader of curve sets in ``.npz`` files."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from optuna_hermes.errors import InvalidInputError
from optuna_hermes.simulator import CurveSet


def read_curve_set(path: str | Path) -> CurveSet:
    """Read a curve set from an ``.npz`` file, without unpickling; see ``CurveSet.from_arrays``.

    Args:
        path: path of the file.

    Raises:
        InvalidInputError: there is no such file, or it is not a curve set.
    """
    return CurveSet.from_arrays(str(path), _arrays(Path(path)))


def _arrays(path: Path) -> dict[str, Any]:
    try:
        # Opened here: numpy does not close a file whose content it refuses.
        with path.open("rb") as file:
            loaded = np.load(file, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                raise InvalidInputError(f"{path} must be an .npz file but is a single array.")
            return dict(loaded.items())
    except InvalidInputError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise InvalidInputError(f"{path} cannot be read: {reason}.") from error
    except (ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise InvalidInputError(
            f"{path} must be an .npz file of plain arrays (numpy.savez) but is not, or is damaged."
        ) from error
