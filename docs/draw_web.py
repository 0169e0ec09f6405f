"""Photograph the web page of a live study, for the docs: desktop, dark and phone.

    python docs/draw_web.py [docs/images] [--after 45]

A study of 24 trials of `examples/digits_lightning.py` trains on four CPU slots, `optuna-hermes web`
shows it, and after so many seconds a headless Chromium takes the pictures: `web-desktop.png`,
`web-dark.png` and `web-phone.png`. One trial is held and one boosted before. Needs the extras
`[lightning,web,browser]`, Debian's `chromium`, and Pillow.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).parents[1]
OBJECTIVE = f"{ROOT}/examples/digits_lightning.py:objective"
TRIALS, DEVICES = 24, "cpu:4"
COLOURS = 256
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "device_scale_factor": 2}
LOOKS: dict[str, dict[str, Any]] = {
    "web-desktop": {"viewport": {"width": 1360, "height": 1180}, "color_scheme": "light"},
    "web-dark": {"viewport": {"width": 1360, "height": 1180}, "color_scheme": "dark"},
    "web-phone": {**PHONE, "color_scheme": "light"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--after", type=float, default=45.0, metavar="SECONDS")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="hermes-draw-") as folder:
        os.environ["OPTUNA_HERMES_RUNTIME_DIR"] = f"{folder}/run"
        study = ("--storage", f"sqlite:///{folder}/study.db", "--study-name", "digits")
        _hermes("create-study", *study, "--direction", "minimize")
        optimize = ("optimize", OBJECTIVE, *study, "--n-trials", str(TRIALS), "--seed", "0")
        with _started(*optimize, "--devices", DEVICES), _page_of(study) as address:
            _draw(address, options.folder, options.after)


def _draw(address: str, folder: Path, after: float) -> None:
    path = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = _open(browser, address, LOOKS["web-desktop"])
        page.wait_for_selector("#rows tr", timeout=120_000)
        time.sleep(after)
        _steer(page)
        for name, look in LOOKS.items():
            _photograph(
                _open(browser, address, look), folder / f"{name}.png", whole="phone" in name
            )
        browser.close()


def _steer(page: Page) -> None:
    """Hold the worst trial that is parked, and boost the next."""
    parked = page.locator("#rows tr:has(td.state:has-text('parked'))")
    numbers = [parked.nth(-i).get_attribute("data-trial") for i in (1, 2)]
    for number, verb in zip(numbers, ("hold", "boost"), strict=True):
        page.click(f"tr[data-trial='{number}'] [data-verb={verb}]")
        page.wait_for_selector(f"tr[data-trial='{number}'] [data-verb={verb}][aria-pressed=true]")


def _photograph(page: Page, target: Path, *, whole: bool) -> None:
    page.wait_for_timeout(1500)
    page.screenshot(path=str(target), full_page=whole)
    page.context.close()
    # A palette has room for all that there is on such a page, and takes a third of the bytes.
    image = Image.open(target).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    image.save(target, optimize=True)
    print(f"{target}: {target.stat().st_size // 1000} kB")


def _open(browser: Browser, address: str, look: dict[str, Any]) -> Page:
    page = browser.new_context(**look).new_page()
    page.goto(address)
    page.wait_for_selector("body[data-ready]")
    return page


def _hermes(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "optuna_hermes", *words], check=True)


@contextlib.contextmanager
def _started(*words: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A command that is interrupted at the end, which suspends its trials."""
    command = [sys.executable, "-m", "optuna_hermes", *words]
    process = subprocess.Popen(command, text=True, **options)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


@contextlib.contextmanager
def _page_of(study: tuple[str, ...]) -> Iterator[str]:
    with _started("web", *study, "--port", "0", stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        found = re.search(r"http://\S+", line)
        if found is None:
            raise SystemExit(line)
        yield found[0]


if __name__ == "__main__":
    main()
