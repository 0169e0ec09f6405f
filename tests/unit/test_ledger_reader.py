"""What a broker reads of studies that clients open."""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from optuna_hermes.broker._protocol import OpenStudy, Register, StudySpec
from optuna_hermes.broker._server._ledger_reader import LedgerReader
from optuna_hermes.broker._server._ledgers import is_shared
from optuna_hermes.errors import InvalidInputError


class Ledgers:
    """A ledger whose study has one trial."""

    def __init__(self) -> None:
        self.reads = 0

    def n_written(self, key: str) -> int:
        return 0

    def read(self, key: str, url: str, ask: Any) -> Future[Any]:
        self.reads += 1
        answer: Future[Any] = Future()
        if ask is is_shared:
            answer.set_result(False)
        else:  # all but the curves first, then these
            known = {"trials": [SimpleNamespace(number=0, units=1)]}
            answer.set_result(known if isinstance(ask, partial) else {})
        return answer


def test_clients_that_come_at_once_have_a_study_read_once() -> None:
    """After a restart of the broker there are hundreds, and nothing is granted meanwhile."""
    ledgers, studies = Ledgers(), dict[str, Any]()
    handler: Any = SimpleNamespace(state=SimpleNamespace(studies=studies))
    reader = LedgerReader(handler, ledgers)  # type: ignore[arg-type]
    spec = StudySpec(key="s", name="s", ledger_url="sqlite:///s.db", policy="fifo")

    async def open_study() -> dict[str, Any]:
        known = await reader.read(Register(study=spec, number=0, trial_id=0), 1)
        served = SimpleNamespace(has_processes=True, spec=spec)
        studies["s"] = served  # as the server does with the answer
        return known

    async def open_all() -> list[dict[str, Any]]:
        return await asyncio.gather(*(open_study() for _ in range(5)))

    first, *others = asyncio.run(open_all())
    assert list(first) == ["trials", "curves"]
    assert others == [{}] * 4
    assert ledgers.reads == 3


def test_a_served_study_keeps_its_policy_while_the_file_is_edited(tmp_path: Path) -> None:
    """Only a driver would change it; a half-saved file refused the next trial of a plain study."""
    place = tmp_path / "mine.py"
    place.write_text("from optuna_hermes.policies import")
    spec = StudySpec(key="s", name="s", ledger_url="sqlite:///s.db", policy=f"{place}:Mine")
    studies = {"s": SimpleNamespace(has_processes=True, spec=spec)}
    handler: Any = SimpleNamespace(state=SimpleNamespace(studies=studies))
    reader = LedgerReader(handler, Ledgers())  # type: ignore[arg-type]
    trial = Register(study=spec, number=0, trial_id=0)
    assert asyncio.run(reader.read(trial, 1)) == {}
    with pytest.raises(InvalidInputError, match="SyntaxError"):
        asyncio.run(reader.read(OpenStudy(study=spec, limit=None, max_alive=1), 1))
    studies.clear()
    with pytest.raises(InvalidInputError, match="SyntaxError"):
        asyncio.run(reader.read(trial, 1))


def test_a_process_that_goes_on_keeps_its_policys_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain study has no process between two trials, and its user may edit the project."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "edited_meanwhile.py").write_text("")
    place = tmp_path / "mine.py"
    place.write_text(
        "import edited_meanwhile\nfrom optuna_hermes.policies import Fifo\nclass Mine(Fifo): ..."
    )
    spec = StudySpec(
        key="s",
        name="s",
        ledger_url="sqlite:///s.db",
        policy=f"{place}:Mine",
        folders=(str(tmp_path),),
    )
    handler: Any = SimpleNamespace(state=SimpleNamespace(studies={}))
    reader = LedgerReader(handler, Ledgers())  # type: ignore[arg-type]
    trial = Register(study=spec, number=0, trial_id=0)
    try:
        assert asyncio.run(reader.read(trial, 1))
        (tmp_path / "edited_meanwhile.py").write_text("MORE = 1")
        assert asyncio.run(reader.read(trial, 1))
        with pytest.raises(InvalidInputError, match="before its last change"):
            asyncio.run(reader.read(trial, 2))
    finally:
        sys.modules.pop("edited_meanwhile", None)
