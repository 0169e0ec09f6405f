"""Draw what `optuna-hermes top` shows of a study that runs: the pictures in docs/images/.

    python docs/draw_screens.py

It starts a study of 24 trials on four CPU slots, as examples/digits_lightning.py but three times as
long, waits until all of them have begun, holds one and boosts another, takes the pictures at 80x24
and at 160x50, and ends the study. That takes some minutes. Needs the extras [lightning] and [top].
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import optuna

from optuna_hermes.broker._protocol import TrialRow
from optuna_hermes.cli import run
from optuna_hermes.cli._studies import broker_status
from optuna_hermes.cli._top import StudySource
from optuna_hermes.view._top._app import Top

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
SIZES = ((80, 24), (160, 50))
N_TRIALS = 24
EPOCHS = 60
SEEN_SECONDS = 90
"""So long `top` looks before its picture is taken: the strip shows what it has seen."""


def objective(trial: optuna.Trial) -> float | None:
    """The network of the example, trained for longer."""
    sys.path.insert(0, str(ROOT / "examples"))
    import torch
    from digits_lightning import Net, loaders
    from lightning import Trainer

    from optuna_hermes.lightning import HermesCallback

    torch.set_num_threads(1)
    model = Net(
        lr=trial.suggest_float("lr", 1e-5, 1e-1, log=True),
        weight_decay=trial.suggest_float("weight_decay", 1e-6, 1e-1, log=True),
        width=trial.suggest_int("width", 16, 256, log=True),
        dropout=trial.suggest_float("dropout", 0.0, 0.6),
    )
    hermes = HermesCallback(trial, monitor="val_loss")
    trainer = Trainer(
        max_epochs=EPOCHS, devices=1, callbacks=[hermes],
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, *loaders())
    return hermes.value


def main() -> None:
    """Run the study, draw, and clear away."""
    folder = Path(tempfile.mkdtemp(prefix="hermes-"))
    os.environ["OPTUNA_HERMES_RUNTIME_DIR"] = str(folder)
    storage = f"sqlite:///{folder}/study.db"
    optuna.create_study(storage=storage, study_name="digits")
    study = ("--storage", storage, "--study-name", "digits")
    words = (
        *("optimize", f"{__file__}:objective", *study, "--n-trials", str(N_TRIALS)),
        *("--devices", "cpu:4", "--seed", "1"),
    )
    log = (folder / "optimize.log").open("w")
    command = [sys.executable, "-m", "optuna_hermes", *words]
    driver = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    try:
        asyncio.run(draw(driver, storage, study))
    finally:
        driver.send_signal(signal.SIGINT)
        driver.wait(60)
        log.close()
        shutil.rmtree(folder)


async def draw(driver: subprocess.Popen[bytes], storage: str, study: tuple[str, ...]) -> None:
    """Look on from the beginning, and take the pictures when there is something to be seen."""
    while not runs():
        check(driver)
        await asyncio.sleep(0.2)
    top = Top(StudySource(storage, "digits"))
    async with top.run_test(size=SIZES[0]) as pilot:
        begin = time.monotonic()
        while time.monotonic() < begin + SEEN_SECONDS or not interesting(runs()):
            check(driver)
            await pilot.pause(0.5)
        waiting = [each for each in runs() if each.state in ("parked", "stored")]
        waiting.sort(key=lambda each: each.value)
        run(["boost", *study, str(waiting[1].number)])
        run(["hold", *study, str(waiting[3].number)])
        await pilot.press("v", "down", "down")
        IMAGES.mkdir(exist_ok=True)
        for width, height in SIZES:
            await pilot.resize_terminal(width, height)
            await pilot.pause(2.5)
            picture = without_fonts(top.export_screenshot())
            (IMAGES / f"top-{width}x{height}.svg").write_text(picture)


def without_fonts(picture: str) -> str:
    """A picture that loads nothing from elsewhere: the reader's own font will do."""
    return re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)


def runs() -> list[TrialRow]:
    """Return the broker's rows of the trials; nothing while there is no broker."""
    status = broker_status()
    return list(status.studies[0].trials) if status and status.studies else []


def interesting(known: list[TrialRow]) -> bool:
    """True if trials are in several states, and nearly all have begun."""
    states = [each.state for each in known]
    waiting = states.count("parked") + states.count("stored")
    return len(states) >= N_TRIALS - 2 and "done" in states and waiting > 3


def check(driver: subprocess.Popen[bytes]) -> None:
    """End with the study's words if it has ended."""
    if driver.poll() is not None:
        raise SystemExit("The study ended before its picture was taken: lengthen EPOCHS.")


if __name__ == "__main__":
    main()
