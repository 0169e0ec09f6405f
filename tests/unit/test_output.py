"""The output of a trial goes to its file, and never makes the trial fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import errno, logging, os, sys
from pathlib import Path
from optuna_hermes.workers import _output

Path.mkdir = {mkdir}
_output.write_output_to(Path(sys.argv[1]))
print("out")
os.system("echo from a child")
print("err", file=sys.stderr)
os.dup2(os.open({then!r}, os.O_WRONLY | os.O_APPEND), 1)
logging.getLogger("optuna_hermes.suspend._tiers._saver").warning("no room")
logging.getLogger("another").warning("anything else")
for line in range(10_000):
    print("a line of a trial that does not know of the disk", flush=line % 2 == 0)
sys.stdout.write("x" * 1_000_000)
sys.stdout.flush()
os._exit(7)
"""


CONFIGURED = """
import logging.config, sys
from pathlib import Path
from optuna_hermes.suspend._tiers import _saver
from optuna_hermes.workers import _output

def write():
    _output.write_output_to(Path(sys.argv[1]))

def configure():
    handler = {{"class": "logging.StreamHandler"}}
    config = {{"version": 1, "handlers": {{"h": handler}}, "root": {{"handlers": ["h"]}}}}
    logging.config.dictConfig(config)

{order}
_saver.warn_of_lost("trial 0", None, ["total"], "")
"""


def run(path: Path, then: object, mkdir: str = "Path.mkdir") -> subprocess.CompletedProcess[str]:
    script = SCRIPT.format(then=str(then), mkdir=mkdir)
    command = [sys.executable, "-c", script, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_full_disk_fails_no_trial(tmp_path: Path) -> None:
    """All that the process and its children say is in the file, until there is no room for it.

    That there is none for a checkpoint is said on the screen.
    """
    path = tmp_path / "trial" / "output.log"
    done = run(path, "/dev/full")
    assert (done.returncode, done.stdout, done.stderr) == (7, "", "no room\n")
    assert path.read_text() == "out\nfrom a child\nerr\nanything else\n"


@pytest.mark.parametrize("order", ["configure(); write()", "write(); configure()"])
def test_a_configuration_of_logging_hides_no_warning(order: str, tmp_path: Path) -> None:
    """A script's disables the loggers that it does not name, and so does one in the objective."""
    path = tmp_path / "output.log"
    command = [sys.executable, "-c", CONFIGURED.format(order=order), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr.startswith("Trial 0 changes total while it trains, and no checkpoint holds")
    assert path.read_text() == done.stderr


def test_no_room_for_the_file(tmp_path: Path) -> None:
    """Then it goes where it went before."""
    no_room = (
        "lambda *_, **__: (_ for _ in ()).throw(OSError(errno.ENOSPC, 'No space left on device'))"
    )
    done = run(tmp_path / "trial" / "output.log", "/dev/null", no_room)
    assert done.returncode == 7
    assert sorted(done.stdout.splitlines()) == ["from a child", "out"]
    assert done.stderr == "err\nno room\nanything else\n"


def test_a_file_that_cannot_be_made(tmp_path: Path) -> None:
    """With a folder in its place all goes where it went before, as without room."""
    (tmp_path / "output.log").mkdir()
    done = run(tmp_path / "output.log", "/dev/null")
    assert done.returncode == 7
    assert sorted(done.stdout.splitlines()) == ["from a child", "out"]


def test_a_link_in_the_place_of_the_file_is_not_followed(tmp_path: Path) -> None:
    """It could lead out of the trial's folder; a file of the trial's own takes its place."""
    precious, path = tmp_path / "precious", tmp_path / "output.log"
    precious.write_text("mine")
    path.symlink_to(precious)
    assert run(path, "/dev/null").returncode == 7
    assert precious.read_text() == "mine"
    assert path.read_text().startswith("out\n")
