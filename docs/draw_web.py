"""Photograph the web page of a live study, for the docs: desktop, dark and phone.

    python docs/draw_web.py [docs/images]

A study of 24 trials of `examples/digits_lightning.py` trains on four CPU slots, `optuna-hermes web`
shows it, and when three are done a headless Chromium takes the pictures: `web-desktop.png`,
`web-dark.png` and `web-phone.png`. One trial is held and one boosted before. Needs the extras
`[lightning,web,browser]`, Debian's `chromium`, and Pillow.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).parents[1]
OBJECTIVE = f"{ROOT}/examples/digits_lightning.py:objective"
TRIALS, DEVICES = 24, "cpu:4"
COLOURS = 256
GAP = 40
PATIENCE_MS = 300_000
DONE = 3
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "device_scale_factor": 2}
LOOKS: dict[str, dict[str, Any]] = {
    "web-desktop": {"viewport": {"width": 1360, "height": 1180}, "color_scheme": "light"},
    "web-dark": {"viewport": {"width": 1360, "height": 1180}, "color_scheme": "dark"},
    "web-phone": {**PHONE, "color_scheme": "light"},
}


def main() -> None:
    """Draw all pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "docs" / "images")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="hermes-draw-") as folder:
        os.environ["OPTUNA_HERMES_RUNTIME_DIR"] = f"{folder}/run"
        study = ("--storage", f"sqlite:///{folder}/study.db", "--study-name", "digits")
        _hermes("create-study", *study, "--direction", "minimize")
        optimize = ("optimize", OBJECTIVE, *study, "--n-trials", str(TRIALS), "--seed", "0")
        with _started(*optimize, "--devices", DEVICES), _page_of(study) as address:
            _draw(address, options.folder)


def _draw(address: str, folder: Path) -> None:
    path = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = _open(browser, address, LOOKS["web-desktop"])
        done = page.locator("#rows tr:has(td.state:has-text('done'))").nth(DONE - 1)
        done.wait_for(timeout=PATIENCE_MS)
        _steer(page)
        for name, look in LOOKS.items():
            page = _open(browser, address, look)
            image = _phone(page) if look.get("is_mobile") else _photograph(page)
            page.context.close()
            _save(image, folder / f"{name}.png")
        browser.close()


def _steer(page: Page) -> None:
    """Hold a trial that is parked, and boost another: not the very best, which are soon done."""
    parked = page.locator("#rows tr:has(td.state:has-text('parked'))")
    numbers = parked.evaluate_all("(rows) => rows.map((row) => row.dataset.trial)")[2:4]
    for number, verb in zip(numbers, ("hold", "boost"), strict=True):
        page.click(f"tr[data-trial='{number}'] [data-verb={verb}]")
        page.wait_for_selector(
            f"tr[data-trial='{number}'] [data-verb={verb}][aria-pressed=true]", timeout=PATIENCE_MS
        )


def _photograph(page: Page) -> Image.Image:
    page.wait_for_timeout(1500)
    return Image.open(io.BytesIO(page.screenshot())).convert("RGB")


def _phone(page: Page) -> Image.Image:
    """Three screens of a phone side by side: from the top, from the charts on, and the trials."""
    screens = []
    for place in ("header", ".panel:has(#path)", "#trials"):
        page.locator(place).evaluate("(found) => scrollTo(0, found.offsetTop - 8)")
        screens.append(_photograph(page))
    width, height = screens[0].size
    image = Image.new("RGB", (3 * width + 2 * GAP, height), "white")
    for i, screen in enumerate(screens):
        image.paste(screen, (i * (width + GAP), 0))
    return image


def _save(image: Image.Image, target: Path) -> None:
    """A palette has room for all the colours of such a page, and takes a third of the bytes."""
    image.quantize(COLOURS, dither=Image.Dither.NONE).save(target, optimize=True)
    print(f"{target}: {target.stat().st_size // 1000} kB")


def _open(browser: Browser, address: str, look: dict[str, Any]) -> Page:
    page = browser.new_context(**look).new_page()
    page.goto(address)
    page.wait_for_selector("body[data-ready]", timeout=PATIENCE_MS)
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
