"""Messages about devices while a study runs."""

from __future__ import annotations

from optuna_hermes.workers._notices import DeviceNews
from support.statuses import device_status


def test_what_lasts_is_told_once() -> None:
    """A problem is a line after three seconds, and so is its end; what is over sooner is none."""
    lines: list[str] = []
    news = DeviceNews(lines.append)
    for now, problem in enumerate(["", "lost", "", "lost", "lost", "lost", "lost", "lost"]):
        news.look([device_status(id="GPU-a", problem=problem), device_status(id="cpu:0")], now)
    assert lines == ["GPU-a: lost."]
    for now in range(10, 20):
        news.look([device_status(id="GPU-a")], now)
    assert lines == ["GPU-a: lost.", "GPU-a: all is well again."]
