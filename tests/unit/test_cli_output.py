"""Standard output belongs to results, and may be written to nobody, or in any encoding."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import IO

import pytest

NOISE = """
import ctypes
from optuna_hermes.cli._output import libraries_to_stderr, show_json
with libraries_to_stderr():
    ctypes.CDLL(None).puts(b"noise")
show_json({"a": 1})
"""


def test_what_a_library_prints_from_c_is_in_no_document() -> None:
    """It goes to standard error, also what would have been written at the end of the process."""
    done = subprocess.run([sys.executable, "-c", NOISE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["{", '"a":', "1", "}"]
    assert done.stderr == "noise\n"


ENCODED = """
from optuna_hermes import cli
from optuna_hermes.cli._output import show
cli.run = lambda argv: show("digits \\U0001f600 \\u2588") or 0
cli.main()
"""


def test_what_the_encoding_lacks_is_spelled() -> None:
    """A study's name may have any character, and the quickstart's curves are drawn with bars."""
    env = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run([sys.executable, "-c", ENCODED], capture_output=True, check=True, env=env)
    assert done.stdout == b"digits \\U0001f600 \\u2588\n"


CLOSED = """
import os, sys
from optuna_hermes import cli

def is_nowhere(number):
    there = os.path.samestat(os.fstat(number), os.stat(os.devnull))
    return there and os.get_inheritable(number)

def run(argv):
    print("to nobody", file=sys.stderr)
    sys.stdin.read()
    return 10 + sum(map(is_nowhere, map(int, argv)))

cli.run = run
cli.main()
"""


@pytest.mark.parametrize("closed", ["2", "12", "012"])
def test_a_stream_that_is_closed_is_opened_to_nowhere(closed: str) -> None:
    """As by ``2>&-``: else its number is that of a socket, and workers write into it."""
    shell = " ".join(f"{number}>&-" for number in closed)
    command = ["sh", "-c", f'exec "$@" {shell}', "sh", sys.executable, "-c", CLOSED, *closed]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert done.returncode == 10 + len(closed)


VERBS = [["status"], ["status", "--json"], ["studies", "--storage", "sqlite:///:memory:"]]


@pytest.mark.parametrize("words", VERBS)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_verb_whose_reader_is_gone_ends_quietly(words: list[str], unbuffered: str) -> None:
    """As behind a pipe to ``head``: status 1, and not a word."""
    ours, theirs = os.pipe()
    os.close(ours)
    with os.fdopen(theirs, "wb") as closed:
        assert printed_to(closed, words, unbuffered) == (1, "")


@pytest.mark.parametrize("words", VERBS)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_verb_without_room_for_its_result_says_so(words: list[str], unbuffered: str) -> None:
    """A full disk is status 1, and a line."""
    with open("/dev/full", "wb") as full:
        status, said = printed_to(full, words, unbuffered)
    assert status == 1
    assert said.startswith("error: The result cannot be printed (No space left on device): ")
    assert said.count("\n") == 1


def printed_to(stream: IO[bytes], words: list[str], unbuffered: str) -> tuple[int, str]:
    """The status of a verb, and what it says on standard error."""
    command = [sys.executable, "-m", "optuna_hermes", *words]
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(
        command, stdout=stream, stderr=subprocess.PIPE, text=True, check=False, env=env
    )
    return done.returncode, done.stderr
