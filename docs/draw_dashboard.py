"""Take the pictures of docs/plots.md: a study, its plots, and both in optuna-dashboard.

    python docs/draw_dashboard.py

Needs ``pip install "optuna-hermes[lightning,plot,dashboard]"``, and Chromium, as Debian's package
has it. It takes two minutes on two cores.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
NAME = "digits"
PAGES = {"dashboard": ("", 1280, 2800), "dashboard-trial": ("/trials?numbers=4", 1280, 800)}
START_SECONDS = 30.0


def main() -> None:
    """Run a small study to its end, then look at it."""
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        storage = f"sqlite:///{folder}/study.db"
        of_study = ("--storage", storage, "--study-name", NAME)
        objective = f"{ROOT}/examples/digits_lightning.py:objective"
        run(
            "optimize",
            objective,
            *of_study,
            "--n-trials",
            "12",
            "--devices",
            "cpu:2",
            "--seed",
            "1",
        )
        against = ("--against", "fifo,round-robin")  # as docs/plots.md has it
        run("plot", *of_study, "--dashboard", "--out", f"{IMAGES}/plots.png", *against)
        with dashboard(storage) as address:
            for name, (page, width, height) in PAGES.items():
                look(f"{address}/dashboard/studies/1{page}", IMAGES / f"{name}.png", width, height)


def run(*words: str) -> None:
    """Run ``optuna-hermes``."""
    subprocess.run([sys.executable, "-m", "optuna_hermes", *words], check=True)


@contextlib.contextmanager
def dashboard(storage: str) -> Iterator[str]:
    """optuna-dashboard on a free port, inside of this block."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    program = Path(sys.executable).with_name("optuna-dashboard")
    process = subprocess.Popen([program, "--port", str(port), "--quiet", storage])
    address = f"http://127.0.0.1:{port}"
    try:
        wait_for(address)
        yield address
    finally:
        process.terminate()
        process.wait()


def wait_for(address: str) -> None:
    """Wait until it answers."""
    end = time.monotonic() + START_SECONDS
    while True:
        try:
            urllib.request.urlopen(f"{address}/dashboard").close()
            return
        except urllib.error.URLError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def look(address: str, target: Path, width: int, height: int) -> None:
    """Take a picture of a page, once it has drawn its charts."""
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [
                "chromium",
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                f"--user-data-dir={profile}",
                f"--window-size={width},{height}",
                "--virtual-time-budget=20000",
                f"--screenshot={target}",
                address,
            ],
            check=True,
            stderr=subprocess.DEVNULL,
        )


if __name__ == "__main__":
    main()
