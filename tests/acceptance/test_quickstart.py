"""``optuna-hermes quickstart``, as a new user meets it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from subprocess import CompletedProcess

import pytest

pytest.importorskip("lightning")
pytest.importorskip("sklearn")

Cli = Callable[..., "CompletedProcess[str]"]

FEW = ("--devices", "cpu:2", "--n-trials", "3")


def test_the_quickstart_ends_with_best_trial_curves_and_next_steps(
    cli: Cli, storage_url: str
) -> None:
    """Three trials are tuned; the screen explains, shows the result and says how to go on."""
    done = cli("quickstart", *FEW, "--storage", storage_url)
    assert done.returncode == 0, done.stderr
    assert "3 trials of a small network" in done.stderr
    for words in ("3 complete", "Validation loss by epoch", "Next:", "outside of batches"):
        assert words in done.stdout
    best = re.search(r"best final value\s+│ (\S+) \(trial (\d)\)", done.stdout)
    assert best is not None
    curves = re.findall(r"^  trial (\d)  [▁▂▃▄▅▆▇█]{15}  \S+$", done.stdout, re.MULTILINE)
    assert sorted(curves) == ["0", "1", "2"]
    assert curves[0] == best[2]
    shown = cli("best-trial", "--storage", storage_url, "--study-name", "quickstart", "-f", "json")
    trial = json.loads(shown.stdout)
    assert trial["number"] == int(best[2])
    assert trial["value"] == pytest.approx(float(best[1]), rel=1e-4)


@pytest.mark.slow
def test_the_quickstart_as_json(cli: Cli, storage_url: str) -> None:
    """With ``--json`` standard output is one document, and the trials really learn."""
    done = cli("quickstart", *FEW, "--storage", storage_url, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [trial["state"] for trial in document["trials"]] == ["COMPLETE"] * 3
    assert document["best"]["value"] < 1.0
