"""The engines' own programs: ``sbatch``, ``kubectl`` and the like."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence

from optuna_hermes.errors import LaunchError


def ask(
    command: Sequence[str],
    text: str | None = None,
    environment: Mapping[str, str] | None = None,
    *,
    seconds: float = 60.0,
    look: str = "",
) -> str:
    """Run a program with ``text`` as its input, and return what it prints within ``seconds``.

    ``look`` is the command that shows what the program has started although it does not answer.

    Raises:
        LaunchError: there is no such program, or it fails or does not answer.
    """
    try:
        done = subprocess.run(
            command,
            input=None if text is None else text.encode(errors="surrogateescape"),
            capture_output=True,
            timeout=seconds,  # programs of a controller that is down wait for minutes
            env={**os.environ, **(environment or {})},
            check=False,
        )
    except OSError as error:
        raise LaunchError(
            f"The program {command[0]!r} cannot be run here ({error.strerror}): run this where the "
            "engine's programs are installed."
        ) from None
    except subprocess.TimeoutExpired:
        may_run = f" The job may have been started: look by `{look}`." if look else ""
        raise LaunchError(
            f"`{command[0]}` has not answered for {seconds:.0f} s: is the engine up?{may_run}"
        ) from None
    # A log may be cut inside of a character.
    output, errors = (each.decode(errors="replace") for each in (done.stdout, done.stderr))
    if done.returncode:
        said = " ".join((errors or output).split()) or f"exit status {done.returncode}"
        raise LaunchError(f"`{shlex.join(command)}` failed: {said}")
    return output
