"""Tests on the simulated accelerator, which their process then has until its end."""

from __future__ import annotations

import pytest

from support.accelerator import built, install, why_not_built


def pytest_collection_finish(session: pytest.Session) -> None:
    """Compile before the first test, whose time is limited."""
    if _asked_for(session.config) and session.items and why_not_built() is None:
        built()


@pytest.fixture(autouse=True, scope="session")
def _simulated(request: pytest.FixtureRequest) -> None:
    # Other tests of the same process would have it too, and could not be forked.
    if not _asked_for(request.config):
        pytest.skip("`nox -s accelerator` runs the tests on the simulated accelerator")
    reason = why_not_built()
    if reason is not None:
        pytest.skip(reason)
    install()


def _asked_for(config: pytest.Config) -> bool:
    return "accelerator" in config.getoption("markexpr")
