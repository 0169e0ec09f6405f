"""``optimize()`` in a notebook: a real kernel, one for all."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

pytestmark = pytest.mark.docs

TUTORIAL = Path(__file__).parents[2] / "examples" / "tutorial.ipynb"


class Kernel:
    """A kernel that runs cells one by one."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def run(self, source: str, *, meanwhile: Callable[[], None] | None = None) -> list[Any]:
        """The outputs of a cell."""
        cell = nbformat.v4.new_code_cell(source)
        self._client.nb.cells.append(cell)
        watcher = threading.Thread(target=meanwhile or (lambda: None))
        watcher.start()
        self._client.execute_cell(cell, len(self._client.nb.cells) - 1)
        watcher.join()
        return list(cell.outputs)

    def interrupt(self) -> None:
        asyncio.run(self._client.km.interrupt_kernel())


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    book = nbformat.v4.new_notebook()
    client = nbclient.NotebookClient(
        book,
        timeout=120,
        kernel_name="python3",
        allow_errors=True,
        resources={"metadata": {"path": str(tmp_path)}},
    )
    with client.setup_kernel():
        yield Kernel(client)


def kinds(outputs: list[Any]) -> list[str]:
    """Return the kinds of outputs, without the warnings of libraries while they are imported."""
    return [each.output_type for each in outputs if each.get("name") != "stderr"]


def test_tutorial(kernel: Kernel, wait_for: Any, tmp_path: Path) -> None:
    """An interrupt parks and says how to go on; the same cell does so, and all is as committed."""

    def interrupt() -> None:
        wait_for(lambda: list(tmp_path.rglob("output.log")))  # a trial trains
        kernel.interrupt()

    for cell in nbformat.read(TUTORIAL, 4).cells:
        if "optimize(study" in cell.source:
            progress, error = kernel.run(cell.source, meanwhile=interrupt)
            assert error.ename == "KeyboardInterrupt"
            assert "suspended: the same call goes on with them." in error.evalue
            assert "Suspending every live trial" in progress["data"]["text/plain"]
        if cell.cell_type == "code":
            outputs = kernel.run(cell.source)
            assert kinds(outputs) == kinds(cell.outputs), outputs
            drawn = [each for each in outputs if "<progress" in str(each.get("data"))]
            assert len(drawn) == ("optimize(study" in cell.source), "one output, replaced"
    study = optuna.load_study(study_name="digits", storage=f"sqlite:///{tmp_path}/tutorial.db")
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 6
