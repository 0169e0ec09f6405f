"""Time until the web page is there, and until it shows a report, and its cost to the broker.

    python benchmarks/web.py [--trials 200] [--points 100] [--pages 20] [--seconds 15] [--json]

A real broker serves a study with so many trials whose curves have so many points, in its ledger;
four of them train at a time, and each of those reports once a second. `optuna-hermes web` shows it
in a real Chromium (Debian's package, or any that is named `chromium`, driven by playwright).

`paint` is from the beginning of the navigation to the first text, and to the first whole drawing of
the study; `update` from the moment a trial has written a report to its socket to the moment the
table shows it; `broker_cores` what the broker's process took with so many open pages, above what it
took with none: one in the browser, the others streams that are read as a page reads them, since so
many browsers would measure themselves. Exit status 1 if a limit is not met.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from _broker import broker
from _web_clients import NAME, fill, reporters
from playwright.sync_api import Browser, Page, sync_playwright

from optuna_hermes.broker import StudySpec

PAINT_LIMIT_SECONDS = 1.0
UPDATE_LIMIT_SECONDS = 1.0
CORES_LIMIT = 0.05
LOADS = 5
SETTLE_SECONDS = 3.0
CALM_CORES = 0.2

WATCH = """() => {
  window.seen = [];
  const look = () => {
    const now = Date.now() / 1000;
    for (const row of document.querySelectorAll("#rows tr")) {
      const units = row.querySelector(".units").textContent;
      if (row.dataset.seen === units) continue;
      row.dataset.seen = units;
      window.seen.push([Number(row.dataset.trial), Number(units), now]);
    }
  };
  look();
  new MutationObserver(look).observe(document.getElementById("rows"),
    {subtree: true, childList: true, characterData: true});
}"""


def main() -> int:
    options = _options()
    with tempfile.TemporaryDirectory(prefix="hermes-web-") as folder:
        url = f"sqlite:///{folder}/study.db"
        study = fill(url, options.trials, options.points)
        with broker(Path(folder), "cpu:4") as process, _reporters(study, options) as pipe:
            result = _measure(process, url, pipe, options)
    result = {"trials": options.trials, "points": options.points, **result}
    result["met"] = _met(result)
    print(json.dumps(result, indent=1) if options.json else _text(result))
    return int(not result["met"])


# -- measuring ---------------------------------------------------------------------------------


def _measure(
    process: psutil.Process, url: str, pipe: Any, options: argparse.Namespace
) -> dict[str, Any]:
    while _cores(process, SETTLE_SECONDS) > CALM_CORES:
        pass  # it still reads the study, and hears its trials for the first time
    without = _cores(process, options.seconds)
    with _web(url) as address, _chromium() as browser:
        paints = [_paint(browser, address) for _ in range(LOADS)]
        page = _open(browser, address)
        page.evaluate(WATCH)
        page.wait_for_timeout(1000 * options.seconds)
        seen = page.evaluate("window.seen")
        others = [_Listener(address) for _ in range(options.pages - 1)]
        page.wait_for_timeout(1000 * SETTLE_SECONDS)
        heard = [each.events for each in others]
        with_pages = _cores(process, options.seconds)
        if any(each.events <= before for each, before in zip(others, heard, strict=True)):
            raise SystemExit("A page was sent nothing.")
        for each in others:
            each.close()
    pipe.send("stop")
    return {
        "pages": 1 + len(others),
        "paint": {
            "text_seconds": max(paint["text"] for paint in paints),
            "drawn_seconds": max(paint["drawn"] for paint in paints),
            "drawn_seconds_median": statistics.median(paint["drawn"] for paint in paints),
            "loads": len(paints),
        },
        "update": _updates(seen, pipe.recv()),
        "broker_cores": {
            "without": without,
            "with_pages": with_pages,
            "pages": with_pages - without,
        },
    }


def _paint(browser: Browser, address: str) -> dict[str, float]:
    """A page in a browser that has never seen it."""
    page = _open(browser, address)
    times = page.evaluate(
        """() => ({
          text: performance.getEntriesByName("first-contentful-paint")[0].startTime / 1000,
          drawn: performance.getEntriesByName("drawn")[0].startTime / 1000,
        })"""
    )
    page.context.close()
    return dict(times)


def _updates(seen: list[list[float]], said: list[tuple[int, int, float]]) -> dict[str, float]:
    """Measure the time from each report until the table had it, or one that was later."""
    first, last = min(at for *_, at in seen), max(at for *_, at in seen)
    late = []
    for number, unit, at in said:
        shown = (when for n, u, when in seen if n == number and u >= unit)
        when = next(shown, None)
        if first < at and when is not None:
            late.append(when - at)
        elif first < at < last - UPDATE_LIMIT_SECONDS:
            raise SystemExit(f"The page never showed unit {unit} of trial {number}.")
    return {
        "reports": len(late),
        "median_seconds": statistics.median(late),
        "max_seconds": max(late),
    }


def _cores(process: psutil.Process, seconds: float) -> float:
    def spent() -> float:
        times = process.cpu_times()
        return times.user + times.system

    begin, before = time.monotonic(), spent()
    time.sleep(seconds)
    return (spent() - before) / (time.monotonic() - begin)


class _Listener:
    """Another page, as far as server and broker see: it reads the stream of events."""

    def __init__(self, address: str) -> None:
        self._answer = urllib.request.urlopen(f"{address}api/events", timeout=30.0)
        self.events = 0
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            for line in self._answer:
                self.events += line.startswith(b"event: ")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._answer.fp.raw._sock.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._answer.close()


# -- what is measured --------------------------------------------------------------------------


@contextlib.contextmanager
def _reporters(study: StudySpec, options: argparse.Namespace) -> Iterator[Any]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    arguments = (theirs, study, options.trials, options.points, 1.0)
    process = context.Process(target=reporters, args=arguments)
    process.start()
    try:
        assert ours.recv() == "joined"
        yield ours
    finally:
        process.terminate()
        process.join()


@contextlib.contextmanager
def _web(url: str) -> Iterator[str]:
    command = [sys.executable, "-m", "optuna_hermes", "web", "--storage", url]
    process = subprocess.Popen(
        [*command, "--study-name", NAME, "--port", "0"], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        found = re.search(r"http://\S+", line)
        if found is None:
            raise SystemExit(line)
        yield found[0]
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def _chromium() -> Iterator[Browser]:
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        raise SystemExit("No Chromium: run `apt-get install chromium`.")
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def _open(browser: Browser, address: str) -> Page:
    page = browser.new_context(viewport={"width": 1360, "height": 1000}).new_page()
    page.goto(address)
    page.wait_for_selector("body[data-ready]")
    return page


# -- reporting ---------------------------------------------------------------------------------


def _met(result: dict[str, Any]) -> bool:
    return bool(
        result["paint"]["drawn_seconds"] <= PAINT_LIMIT_SECONDS
        and result["update"]["max_seconds"] <= UPDATE_LIMIT_SECONDS
        and result["broker_cores"]["pages"] <= CORES_LIMIT
    )


def _text(result: dict[str, Any]) -> str:
    paint, update, cores = result["paint"], result["update"], result["broker_cores"]
    return "\n".join(
        (
            f"{result['trials']} trials of {result['points']} points",
            f"first text {paint['text_seconds']:.2f} s, all drawn {paint['drawn_seconds']:.2f} s "
            f"(median {paint['drawn_seconds_median']:.2f}, of {paint['loads']} loads)",
            f"a report is shown after {update['median_seconds']:.2f} s (at most "
            f"{update['max_seconds']:.2f}, of {update['reports']})",
            f"{result['pages']} pages cost the broker {100 * cores['pages']:.1f} % of a core "
            f"({100 * cores['without']:.1f} % without)",
            "limits met" if result["met"] else "a limit is NOT met",
        )
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--points", type=int, default=100)
    parser.add_argument("--pages", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
