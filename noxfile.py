"""Sessions: ``nox -l`` lists them, ``nox -s tests -- -k lease`` passes options to pytest."""

from __future__ import annotations

import nox

nox.needs_version = ">=2025.2"
nox.options.sessions = ["tests", "lint", "types"]
nox.options.reuse_existing_virtualenvs = True
# pip alone knows the constraints file and a configured index in every set-up.
nox.options.default_venv_backend = "venv"

CONSTRAINED = ("-c", "constraints.txt")
# Not by the number of their tests: the longest ones are few.
SIDE_BY_SIDE = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "--durations=30")

LOWEST_TESTS = (
    "tests/unit/test_cli.py",
    "tests/unit/test_web_app.py",
    "tests/unit/test_protocol.py",
    "tests/contract/test_ledger.py",
    "tests/contract/test_optuna_private.py",
    "tests/contract/test_tables.py",
    "tests/integration/test_broker_process.py",
    "tests/integration/test_one_ledger.py",
    "tests/integration/test_privacy.py",
    "tests/acceptance/test_bad_input.py",
)


@nox.session
def tests(session: nox.Session) -> None:
    """Every test that is not slow, files side by side: most wait for processes that start."""
    session.install(*CONSTRAINED, "-e", ".[lightning,test,docs]")
    session.run("python", "-m", "pytest", "-m", "not slow", *SIDE_BY_SIDE, *session.posargs)


@nox.session
def lowest(session: nox.Session) -> None:
    """The lowest versions that pyproject.toml admits, without torch: what all users have."""
    project = nox.project.load_toml("pyproject.toml")["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["web"]]
    session.install(*(each.replace(">=", "==") for each in needed))
    session.install("-e", ".", "pytest", "pytest-timeout", "hypothesis", "httpx2", "packaging")
    session.run("python", "-m", "pytest", "-m", "not slow", *LOWEST_TESTS, *session.posargs)


@nox.session
def browser(session: nox.Session) -> None:
    """The web page in a real Chromium, which has to be there (`apt-get install chromium`)."""
    session.install(*CONSTRAINED, "-e", ".[lightning,test,browser]")
    session.run("python", "-m", "pytest", "tests/acceptance/test_web_browser.py", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Style, format and who may import whom; needs none of the package's dependencies."""
    session.install(*CONSTRAINED, "ruff", "import-linter")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports")


@nox.session
def types(session: nox.Session) -> None:
    """Strict types, against the real torch and Lightning."""
    # Nothing of it is imported.
    session.install("--no-compile", *CONSTRAINED, "-e", ".[lightning,test,types]", "nox")
    session.run("mypy", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """The site in site/, and what README, docs and examples show, run as it stands there."""
    session.install(*CONSTRAINED, "-e", ".[lightning,test,docs]")
    session.run("mkdocs", "build", "--strict", "--quiet")
    session.run("python", "-m", "pytest", "-m", "docs", *session.posargs)


@nox.session
def quickstart(session: nox.Session) -> None:
    """The main job as a new user meets it."""
    session.install(*CONSTRAINED, "-e", ".[lightning]")
    session.run("optuna-hermes", "quickstart", *session.posargs)
