"""``optuna-hermes web`` in a real, headless Chromium.

They need ``pip install "optuna-hermes[browser]"`` and Debian's ``chromium``, and are skipped
without; the one about accessibility needs ``npm`` too.
"""

from __future__ import annotations

import functools
import http.server
import os
import re
import shutil
import signal
import subprocess
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.distributions import FloatDistribution
from optuna.trial import TrialState, create_trial

from optuna_hermes import _optuna
from optuna_hermes.ledger import (
    EventRecord,
    LeaseRecord,
    TrialRecord,
    open_ledger,
)
from optuna_hermes.view._web._page import MOST_POINTS
from support.records import report

playwright = pytest.importorskip("playwright.sync_api", reason="needs the extra [browser]")
pytest.importorskip("starlette", reason="needs the extra [web]")

AXE = "axe-core@4.14.1"
NASTY = "<img src=x onerror=document.title='pwned'>"
DESKTOP, PHONE = {"width": 1360, "height": 1000}, {"width": 390, "height": 844}

OBJECTIVE = textwrap.dedent(
    """
    import time
    import torch
    from optuna_hermes import suspendable

    def objective(trial):
        torch.set_num_threads(1)
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=trial.suggest_float("lr", 0.01, 0.1))
        loader = torch.utils.data.DataLoader(torch.ones(4, 1), batch_size=1)
        run = suspendable(trial, model=model, optimizer=optimizer)
        for epoch in run.epochs(100_000):
            for _ in run.batches(loader):
                time.sleep(0.02)  # a batch takes its time
            run.report(1 / (1 + epoch) + trial.number / 100)
        return run.value
    """
)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A browser for all tests of this file."""
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("needs a Chromium: apt-get install chromium")
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def web(start_cli: Callable[..., Any], wait_for: Callable[..., Any]) -> Callable[..., str]:
    """``web(url, *args)`` starts the server and returns the page's address."""

    def start(url: str, *args: object) -> str:
        study = ("--storage", url, "--study-name", "s")
        running = start_cli("web", *study, "--port", 0, *args)
        found = wait_for(lambda: re.search(r"http://\S+", running.stderr), message="it serves")
        return str(found[0])

    return start


@contextmanager
def opened(browser: Any, address: str, **options: Any) -> Iterator[Any]:
    """A page that is drawn; whatever it complains of is an error."""
    context = browser.new_context(**{"viewport": DESKTOP, **options})
    page = context.new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda said: said.type == "error" and complaints.append(said.text))
    page.goto(address)
    page.wait_for_selector("body[data-ready]")
    yield page
    context.close()
    assert complaints == []


@pytest.fixture
def ended(storage_url: str) -> str:
    """A study in the ledger: trials of all states but those that need a process."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(storage=storage_url, study_name="s")
    states = [TrialState.COMPLETE] * 6 + [TrialState.FAIL] + [TrialState.RUNNING] * 3
    lr = {"lr": FloatDistribution(0.0, 1.0), NASTY: FloatDistribution(0.0, 1.0)}
    for state in states:
        value = 0.5 if state == TrialState.COMPLETE else None
        study.add_trial(
            create_trial(state=state, value=value, params={"lr": 0.1, NASTY: 0.2}, distributions=lr)
        )
    key = _optuna.study_key(study)
    ledger = open_ledger(storage_url)
    with ledger.batch():
        for number in range(len(states)):
            _write(ledger, key, number)
    ledger.close()
    return storage_url


def _write(ledger: Any, key: str, number: int) -> None:
    run = TrialRecord(
        study=key,
        number=number,
        trial_id=number + 1,
        state="stored",
        tier="disk",
        slices=1,
        device_seconds=8.0,
        energy_joules=7200.0,
    )
    ledger.save_trial(run)
    begin = 1_700_000_000.0 + 8 * (number // 2)
    for unit in range(1, 9):
        ledger.add_report(
            report(unit, (number + 1) / unit, number=number, study=key, at=begin + unit)
        )
    ledger.commit_lease(
        LeaseRecord(
            study=key,
            epoch=number + 1,
            number=number,
            devices=(f"vm/cpu:{number % 2}",),
            host="vm",
            started=begin,
            ended=begin + 8.0,
        )
    )
    ledger.add_event(
        EventRecord(study=key, number=number, kind="failed", at=begin, detail={"error": NASTY})
    )


def row(page: Any, number: int) -> Any:
    return page.locator(f"tr[data-trial='{number}']")


# -- a study that has ended --------------------------------------------------------------------


@pytest.fixture(scope="session")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The source of axe-core, which is no part of this package."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip(f"needs npm to fetch {AXE}")
    folder = tmp_path_factory.mktemp("axe")
    fetched = subprocess.run(
        [npm, "pack", AXE, "--silent"], cwd=folder, capture_output=True, check=False, timeout=60
    )
    if fetched.returncode:
        pytest.skip(f"npm does not give {AXE}")
    (archive,) = folder.glob("*.tgz")
    shutil.unpack_archive(archive, folder)
    return (folder / "package" / "axe.min.js").read_text()


MODES = [
    pytest.param({"color_scheme": "light"}, id="light"),
    pytest.param({"color_scheme": "dark"}, id="dark"),
    pytest.param({"viewport": PHONE, "is_mobile": True, "has_touch": True}, id="phone"),
]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_axe_finds_no_serious_problem(
    mode: dict[str, Any], axe: str, chromium: Any, web: Callable[..., str], ended: str
) -> None:
    """Neither on the page nor in its dialogs, in every look that it has."""
    with opened(chromium, web(ended), **mode) as page:
        page.evaluate(axe)
        row(page, 7).locator("[data-verb=boost]").click()
        page.wait_for_selector("tr[data-trial='7'] :text('boosted')")
        assert _problems(page) == []
        row(page, 8).locator("[data-verb=finish]").click()
        assert _problems(page) == []
        page.keyboard.press("Escape")
        row(page, 8).locator(".open").click()
        page.wait_for_selector("#events-body dl")
        assert _problems(page) == []
        page.keyboard.press("Escape")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def _problems(page: Any) -> list[str]:
    found = page.evaluate("axe.run()")["violations"]
    return [
        f"{each['id']}: {node['html']}"
        for each in found
        if each["impact"] in ("serious", "critical")
        for node in each["nodes"]
    ]


def test_an_ended_study_is_shown_from_its_ledger(
    chromium: Any, web: Callable[..., str], ended: str
) -> None:
    """Without a broker: values, states, energy, a picture in every chart, and a trial's event log.

    Names and values are text: nothing of them becomes HTML. A state may be chosen, rows go by any
    column, and the theme stays.
    """
    with opened(chromium, web(ended), color_scheme="light") as page:
        assert page.inner_text("#live") == "Not running"
        assert page.inner_text("#best") == "0.125"
        assert page.inner_text("#energy") == "20.0 Wh"
        assert page.inner_text("#overhead") == "\u2013"  # a dash: only a broker knows it
        assert page.locator("#rows tr").count() == 10
        for chart in ("curves", "path", "schedule"):
            assert _colours(page, chart) > 3, chart

        row(page, 7).locator(".open").click()
        page.wait_for_selector("#events-body dl")
        assert page.locator("#events-body img").count() == 0
        assert page.inner_text("#events-body").count(NASTY) == 2
        page.keyboard.press("Escape")

        page.click("#chips button:has-text('done')")
        assert page.locator("#rows tr").count() == 6
        page.click("#chips button:has-text('done')")
        page.click("th[data-id=number] button")
        page.click("th[data-id=number] button")
        assert page.get_attribute("th[data-id=number]", "aria-sort") == "descending"
        assert page.locator("#rows tr").first.get_attribute("data-trial") == "9"

        page.click("#theme-switch")
        page.click("#theme-switch")
        page.reload()
        page.wait_for_selector("body[data-ready]")
        assert page.get_attribute("html", "data-theme") == "dark"
        assert page.title() != "pwned"


def _colours(page: Any, chart: str) -> int:
    """Count the colours of a chart's canvas."""
    return int(
        page.evaluate(
            """(id) => {
              const canvas = document.querySelector(`#${id} canvas`);
              const {width, height} = canvas;
              const {data} = canvas.getContext("2d").getImageData(0, 0, width, height);
              return new Set(new Uint32Array(data.buffer)).size;
            }""",
            chart,
        )
    )


def _texts(page: Any, chart: str, least: int) -> set[str]:
    """Return the texts written into a chart from now on, until there are that many."""
    return set(
        page.evaluate(
            """([id, least]) => new Promise((resolve) => {
              const texts = [];
              const fill = CanvasRenderingContext2D.prototype.fillText;
              CanvasRenderingContext2D.prototype.fillText = function (text, ...at) {
                if (this.canvas.closest(`#${id}`) && texts.push(text) === least) resolve(texts);
                return fill.call(this, text, ...at);
              };
            })""",
            [chart, least],
        )
    )


def _paint(page: Any, call: str) -> Any:
    """Call a function of ``paint.js`` in the page."""
    return page.evaluate(f"async () => (await import(new URL('paint.js', location))).{call}")


def test_a_trial_that_diverges_leaves_the_scale(
    chromium: Any, web: Callable[..., str], ended: str
) -> None:
    """A tenth of them flattens no other curve, on either scale; the title names the trial.

    Over very many decades an axis has lines and labels, a dozen at most.
    """
    with closing(open_ledger(ended)) as ledger:
        key = ledger.load_studies()[0]
        for unit in range(1, 9):
            at = 1_700_000_100.0 + unit
            ledger.add_report(report(unit, 1e308, number=9, study=key, at=at))
    with opened(chromium, web(ended)) as page:
        assert "trial 9 leaves the scale" in page.inner_text("#curves-more")
        page.click("#log")
        assert "trial 9 leaves the scale" in page.inner_text("#curves-more")
        curves = "[...Array(9).fill([2, 0.5]), [2, 1e20]]"
        for log in ("true", "false"):
            usual = _paint(page, f"usualBounds({curves}, {log}, false)")
            assert usual == pytest.approx([0.5, 2.0])
        turned = _paint(page, "usualBounds([...Array(3).fill([0.1, 0.9]), [-1e308]], false, true)")
        assert turned == [0.1, 0.9]
        assert _paint(page, "span([-1e308, 1e308], false)") == [-1e300, 1e300]
        lines = _paint(page, "LOG.splits(null, 0, 1e-40, 1e300)")
        assert 8 <= len(lines) <= 13
        assert _paint(page, f"LOG.filter(null, {lines})") == lines
        assert _paint(page, "LOG.splits(null, 0, 0.5, 3)") == [0.5, 0.6, 0.7, 0.8, 0.9, 1, 2, 3]
        assert _paint(page, "LOG.splits(null, 0, 1.2, 1.4)") == [1.2, 1.4]


def test_first_values_that_diverge_leave_the_scale_of_the_best_so_far(
    chromium: Any, web: Callable[..., str], ended: str
) -> None:
    """As they leave that of the curves: all that follows would be a flat line."""
    with closing(open_ledger(ended)) as ledger:
        key = ledger.load_studies()[0]
        ledger.add_report(report(1, 1e9, number=9, study=key, device_seconds=0.1))
    with opened(chromium, web(ended)) as page:
        assert page.inner_text("#path-more").endswith("first values leave the scale")


def test_the_best_value_of_a_long_curve_is_on_the_scale_of_the_best_so_far(
    chromium: Any, web: Callable[..., str], ended: str
) -> None:
    """A curve that is thinned out may lack it, the steps never do."""
    with closing(open_ledger(ended)) as ledger, ledger.batch():
        key = ledger.load_studies()[0]
        for unit in range(9, MOST_POINTS + 3):
            value = 0.01 if unit == 10 else 0.2  # every second point is left out
            ledger.add_report(report(unit, value, study=key, at=1_700_000_100.0 + unit))
    with opened(chromium, web(ended)) as page:
        assert page.inner_text("#best") == "0.01"
        assert page.inner_text("#path-more") == "of all reports, by device time"


def test_the_keyboard_reaches_everything(
    chromium: Any, web: Callable[..., str], ended: str
) -> None:
    """Arrows go through the trials, letters act on them, and one trial is one stop of Tab."""
    with opened(chromium, web(ended)) as page:
        page.locator("#rows tr").first.locator(".open").focus()
        page.keyboard.press("ArrowDown")
        page.keyboard.press("ArrowDown")
        assert page.evaluate("document.activeElement.textContent") == "2"
        page.keyboard.press("End")
        assert page.evaluate("document.activeElement.textContent") == "9"
        page.keyboard.press("Enter")
        page.wait_for_selector("#events[open]")
        page.keyboard.press("Escape")
        assert page.evaluate("document.activeElement.textContent") == "9"
        page.keyboard.press("h")
        page.wait_for_selector("tr[data-trial='9'] :text('held')")
        page.keyboard.press("h")
        page.wait_for_selector("tr[data-trial='9']:not(:has(:text('held')))")
        page.keyboard.press("?")
        page.wait_for_selector("#keys[open]")
        page.keyboard.press("Escape")
        stops = "[...document.querySelectorAll('#rows button')].filter((b) => b.tabIndex === 0)"
        assert page.evaluate(f"new Set({stops}.map((b) => b.closest('tr'))).size") == 1


def test_the_token_is_asked_for_and_leaves_the_address(
    chromium: Any, web: Callable[..., str], ended: str
) -> None:
    """At an address that others reach: 401 without, then the page, and a cookie for later."""
    address = web(ended, "--host", "0.0.0.0")
    bare, token = re.sub(r"//[^:/]+", "//127.0.0.1", address).split("?token=")
    context = chromium.new_context()
    page = context.new_page()
    assert page.goto(bare).status == 401
    page.fill("#token", token)
    page.click("button")
    page.wait_for_selector("body[data-ready]")
    assert page.url == bare
    assert page.reload().status == 200
    context.close()
    with opened(chromium, f"{bare}?token={token}") as page:
        assert page.url == bare


def test_a_page_that_hears_nothing_says_so_and_asks_again(
    chromium: Any, web: Callable[..., str], ended: str
) -> None:
    """Over a tunnel that is dead no connection is closed: only the server's silence shows it."""
    with opened(chromium, web(ended)) as page:
        assert page.get_attribute("#live", "data-is") != "lost"
        page.clock.install()
        page.clock.fast_forward(60_000)  # a computer that has slept
        page.wait_for_selector("#live[data-is=lost]")
        page.wait_for_selector("#live:not([data-is=lost])")


SILENT_STREAM = """
window.EventSource = class extends EventTarget {{
  static OPEN = 1;
  static CLOSED = 2;
  readyState = {state};
  close() {{ this.readyState = 2; }}
}};
"""


@pytest.mark.parametrize(
    ("state", "seconds", "lost"), [(1, 300, False), (1, 700, True), (0, 60, True)]
)
def test_the_first_page_may_take_long(
    state: int, seconds: int, lost: bool, chromium: Any, web: Callable[..., str], ended: str
) -> None:
    """Nothing is heard of an event before its last byte; a stream that is not open has none."""
    context = chromium.new_context()
    page = context.new_page()
    page.add_init_script(SILENT_STREAM.format(state=state))
    page.clock.install()
    page.goto(web(ended))
    page.clock.fast_forward(1000 * seconds)
    assert (page.get_attribute("#live", "data-is") == "lost") is lost
    context.close()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


def test_a_page_of_another_site_can_do_nothing(
    chromium: Any,
    web: Callable[..., str],
    ended: str,
    tmp_path: Path,
    wait_for: Callable[..., Any],
) -> None:
    """Somebody who has the page open visits another one, which sends forms and requests to it."""
    address = web(ended)
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / "index.html").write_text(
        f"""<!doctype html>
        <form method="post" action="{address}api/trials/8/hold" target="f"></form>
        <iframe name="f"></iframe><script>
        document.forms[0].submit();
        fetch("{address}api/trials/8/hold", {{method: "POST", mode: "no-cors"}}).catch(() => 0);
        fetch("{address}api/trials/8", {{credentials: "include"}})
          .then(() => document.title = "read", () => document.title = "refused");
        </script>"""
    )
    handler = functools.partial(_Quiet, directory=str(tmp_path / "evil"))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    statuses: list[int] = []
    try:
        with opened(chromium, address) as ours:
            evil = ours.context.new_page()
            evil.on("response", lambda got: "/api/" in got.url and statuses.append(got.status))
            evil.goto(f"http://127.0.0.1:{server.server_port}/")
            evil.wait_for_function("document.title === 'refused'")
            wait_for(lambda: evil.wait_for_timeout(20) or statuses)
            assert set(statuses) == {403}
            assert row(ours, 8).locator(":text('held')").count() == 0
    finally:
        server.shutdown()
        server.server_close()


# -- a study that runs -------------------------------------------------------------------------


@pytest.mark.slow
def test_a_live_study_is_seen_and_steered(
    chromium: Any,
    web: Callable[..., str],
    start_cli: Callable[..., Any],
    storage_url: str,
    tmp_path: Path,
    runtime_dir: Path,
) -> None:
    """Reports arrive; trials are held, boosted and finished, by click and by keyboard.

    When the broker is gone the page says so, and shows what the ledger has.
    """
    (tmp_path / "train.py").write_text(OBJECTIVE)
    optuna.create_study(storage=storage_url, study_name="s")
    study = ("--storage", storage_url, "--study-name", "s")
    start_cli(
        *("optimize", "train.py:objective", *study, "--n-trials", 5, "--devices", "cpu:2"),
        *("--policy", "fifo", "--slice-seconds", 0.2),
    )
    with opened(chromium, web(storage_url)) as page:
        page.wait_for_selector("#live[data-is=live]")
        page.wait_for_selector("tr[data-trial='1'] .units:not(:text-is('0'))")
        before = row(page, 0).locator(".units").inner_text()
        page.wait_for_selector(f"tr[data-trial='0'] .units:not(:text-is('{before}'))")
        assert {"cpu:0", "cpu:1"} <= _texts(page, "schedule", least=50)

        row(page, 0).locator("[data-verb=hold]").click()  # fifo: 0 and 1 have the devices
        page.wait_for_selector("tr[data-trial='0'] .state:has-text('parked'):has-text('held')")
        row(page, 0).locator(".open").focus()
        page.keyboard.press("h")
        page.wait_for_selector("tr[data-trial='0']:not(:has(:text('held')))")

        row(page, 0).locator("[data-verb=boost]").click()
        page.wait_for_selector("tr[data-trial='0'] .state:has-text('boosted')")
        row(page, 0).locator(".open").focus()
        page.keyboard.press("b")
        page.wait_for_selector("tr[data-trial='0']:not(:has(:text('boosted')))")

        row(page, 0).locator("[data-verb=finish]").click()
        page.keyboard.press("Escape")
        assert "done" not in row(page, 0).inner_text()
        row(page, 0).locator("[data-verb=finish]").click()
        page.click("#ask button[value=yes]")
        page.wait_for_selector("tr[data-trial='0'] .state:has-text('done')")
        row(page, 1).locator(".open").focus()
        page.keyboard.press("f")
        page.keyboard.press("Enter")
        page.wait_for_selector("tr[data-trial='1'] .state:has-text('done')")
        states = [t.state for t in optuna.load_study(study_name="s", storage=storage_url).trials]
        assert states[:2] == [TrialState.COMPLETE] * 2

        _kill_all(runtime_dir)
        page.wait_for_selector("#live[data-is=away]")
        assert "No broker answers" in page.inner_text("#notes")


def _kill_all(runtime_dir: Path) -> None:
    """The broker and who could start another; not the page's server."""
    import psutil

    for process in psutil.process_iter():
        try:
            here = process.environ().get("OPTUNA_HERMES_RUNTIME_DIR") == str(runtime_dir)
            ours = here and process.pid != os.getpid() and "web" not in process.cmdline()
            if ours and any("optuna_hermes" in part for part in process.cmdline()):
                process.send_signal(signal.SIGKILL)
        except (psutil.Error, OSError):
            continue
