"""Tests on the simulated accelerator, which their process then has until its end."""

from __future__ import annotations

import pytest

from support.accelerator import install, why_not_built


@pytest.fixture(autouse=True, scope="session")
def _simulated(request: pytest.FixtureRequest) -> None:
    # Other tests of the same process would have it too, and could not be forked.
    if "accelerator" not in request.config.getoption("markexpr"):
        pytest.skip("`nox -s accelerator` runs the tests on the simulated accelerator")
    reason = why_not_built()
    if reason is not None:
        pytest.skip(reason)
    install()
