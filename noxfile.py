"""Sessions: ``nox -l`` lists them, ``nox -s tests -- -k lease`` passes options to pytest."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import nox
from packaging.version import Version

nox.needs_version = ">=2025.2"
nox.options.sessions = ["tests", "lint", "types"]
nox.options.reuse_existing_virtualenvs = True
# pip alone knows the constraints file and a configured index in every set-up.
nox.options.default_venv_backend = "venv"

OTHER_PYTHONS = ("3.10", "3.12", "3.13", "3.14")
CONSTRAINED = ("-c", "constraints.txt")
# Not by the number of their tests: the longest ones are few.
# More processes than cores, since most tests wait for processes that start.
SIDE_BY_SIDE = ("-n", "3", "--dist", "loadfile", "--no-loadscope-reorder", "--durations=30")

# The sampler, the pruner, the callback and `optimize`, with what they rely on in libraries.
CORNER_TESTS = (
    "tests/unit/test_versions.py",
    "tests/unit/test_preload.py",
    "tests/contract/test_optuna_private.py",
    "tests/contract/test_torch_private.py",
    "tests/contract/test_lightning_private.py",
    "tests/contract/test_lightning_ddp_private.py",
    "tests/contract/test_lightning_namespaces.py",
    "tests/integration/test_plain_optuna.py",
    "tests/integration/test_around_optuna.py",
    "tests/integration/test_lightning_callback.py",
    "tests/integration/test_lightning_exact.py",
    "tests/integration/test_unsaved_state.py",
    "tests/integration/test_optimize_api.py",
)
LOWEST_TESTS = (
    *CORNER_TESTS,
    "tests/unit/test_cli.py",
    "tests/unit/test_web_app.py",
    "tests/unit/test_protocol.py",
    "tests/unit/test_visualization.py",
    "tests/contract/test_ledger.py",
    "tests/contract/test_tables.py",
    "tests/integration/test_broker_process.py",
    "tests/integration/test_one_ledger.py",
    "tests/integration/test_privacy.py",
    "tests/integration/test_sklearn.py",
    "tests/acceptance/test_bad_input.py",
)
CORNER_NEEDS = (
    *("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "accelerate"),
    *("tensorboard", "cmaes", "httpx2", "packaging"),
)
RENAMED = {
    "import lightning as L": "import pytorch_lightning as L",
    "lightning.pytorch": "pytorch_lightning",
    "lightning.fabric": "lightning_fabric",
}
DISTRIBUTIONS = ("lightning", "pytorch-lightning")

# Extras whose floors go together. [top] and [huggingface] need later ones of other packages.
LOWEST_EXTRAS = (
    *("lightning", "postgres", "mysql", "metrics", "web", "sklearn", "lightgbm", "plot"),
    "dashboard",
)
# Pins that Optuna, Lightning and torch bring, or that older ones of them do not admit.
FOLLOWING = ("optuna", "lightning", "pytorch-lightning", "torch", "fsspec", "packaging", "sympy")


@nox.session
def tests(session: nox.Session) -> None:
    """Every test that is not slow, or with `-- fast` those that start no process.

    Files are side by side.
    """
    all_tests(session)


@nox.session(python=OTHER_PYTHONS)
def pythons(session: nox.Session) -> None:
    """The same on other Pythons than 3.11: `nox -s pythons-3.13`, or each one that is there."""
    all_tests(session)


def all_tests(session: nox.Session) -> None:
    """Install what the tests need, and run them, or those that the command line chooses."""
    session.install(*CONSTRAINED, "-e", ".[lightning,test,docs]")
    fast = session.posargs[:1] == ["fast"]
    chosen = ["tests/unit", *session.posargs[1:]] if fast else session.posargs
    # Else each process that a test starts compiles it, where none may write what it has compiled.
    session.run("python", "-m", "compileall", "-q", "optuna_hermes")
    session.run("python", "-m", "pytest", "-m", "not slow", *SIDE_BY_SIDE, *chosen)


@nox.session
def lowest(session: nox.Session) -> None:
    """The lowest versions that pyproject.toml admits, of all direct dependencies."""
    session.install(*floors(("", *LOWEST_EXTRAS)), *CORNER_NEEDS, "pgserver")
    session.install("--no-deps", "-e", ".")
    # Old libraries use what the newest of their own dependencies deprecate.
    quiet = ("-W", "ignore::DeprecationWarning")
    options = ("-m", "not slow", *quiet, *SIDE_BY_SIDE)
    session.run("python", "-m", "pytest", *options, *LOWEST_TESTS, *session.posargs)


@nox.session
@nox.parametrize("distribution", DISTRIBUTIONS, ids=DISTRIBUTIONS)
def oldest(session: nox.Session, distribution: str) -> None:
    """The oldest Optuna, Lightning and torch, with all else as tested; in each namespace."""
    kept = [
        line
        for line in Path("constraints.txt").read_text().splitlines()
        if line.partition("==")[0] not in FOLLOWING
    ]
    rest = Path(session.create_tmp(), "rest.txt")
    pinned = [each for each in floors(("", distribution)) if each.partition("==")[0] in FOLLOWING]
    if distribution == "lightning":  # it asks for any version of the other one
        pinned += [f"pytorch-{each}" for each in pinned if each.startswith("lightning==")]
    rest.write_text("\n".join(kept + pinned))
    corner(session, distribution, rest)


@nox.session
@nox.parametrize("distribution", DISTRIBUTIONS, ids=DISTRIBUTIONS)
def newest(session: nox.Session, distribution: str) -> None:
    """The newest Optuna, Lightning and torch that are tested; in each namespace."""
    corner(session, distribution, Path("constraints.txt").resolve())


@nox.session
def packages(session: nox.Session) -> None:
    """The wheel and the sdist, each installed where nothing else is, as a new user has them."""
    session.install("build")
    folder = Path(session.create_tmp()).resolve()
    session.run("python", "-m", "build", "--outdir", str(folder / "dist"))
    for number, built in enumerate(sorted((folder / "dist").iterdir())):
        home = folder / f"{number}"
        session.run("python", "-m", "venv", "--clear", str(home / "venv"))
        python, command = (str(home / "venv/bin" / name) for name in ("python", "optuna-hermes"))
        wanted = f"optuna-hermes[lightning] @ {built.as_uri()}"
        constraints = Path("constraints.txt").resolve()
        session.run(python, "-m", "pip", "install", "-c", str(constraints), wanted, external=True)
        with session.chdir(home):  # the checkout is not there to be imported
            session.run(command, "--help", external=True)
            session.run(command, "quickstart", *session.posargs, external=True)


def corner(session: nox.Session, distribution: str, constraints: Path) -> None:
    """Test against other versions, or the other namespace: there, what tests import is renamed."""
    extra = f".[{distribution}]"
    session.install("-c", str(constraints), "-e", extra, *CORNER_NEEDS)
    if distribution != "lightning":
        session.chdir(renamed(Path(session.create_tmp(), "renamed")))
    session.run(
        *("python", "-m", "pytest", "-m", "not slow", *SIDE_BY_SIDE, *CORNER_TESTS),
        *session.posargs,
    )


def renamed(folder: Path) -> Path:
    """A copy of the tests in which ``lightning.pytorch`` is ``pytorch_lightning``."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree("tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy("pyproject.toml", folder)
    for file in (folder / "tests").rglob("*.py"):
        if file.name not in ("test_lightning_namespaces.py", "test_versions.py"):
            text = file.read_text()
            for old, new in RENAMED.items():
                text = re.sub(rf"\b{re.escape(old)}\b", new, text)
            file.write_text(text)
    return folder


def floors(extras: Sequence[str]) -> list[str]:
    """The floors of what the package needs ("") and of what its extras do, the highest of each."""
    project = nox.project.load_toml("pyproject.toml")["project"]
    found: dict[str, Version] = {}
    for extra in extras:
        for each in project["optional-dependencies"][extra] if extra else project["dependencies"]:
            name, floor = re.match(r"([^>]+)>=([\d.]+)", each).groups()  # type: ignore[union-attr]
            found[name] = max(found.get(name, Version("0")), Version(floor))
    return [f"{name}=={floor}" for name, floor in found.items()]


@nox.session
def browser(session: nox.Session) -> None:
    """The web page in a real Chromium, which has to be there (`apt-get install chromium`)."""
    session.install(*CONSTRAINED, "-e", ".[lightning,test,browser]")
    session.run("python", "-m", "pytest", "tests/acceptance/test_web_browser.py", *session.posargs)


@nox.session
def accelerator(session: nox.Session) -> None:
    """Suspension on a simulated accelerator, which is compiled once: g++ has to be there.

    With `-- lines` it counts which lines that no CPU test runs these tests run.
    """
    session.install(*CONSTRAINED, "-e", ".[lightning,test]", "ninja")
    if session.posargs == ["lines"]:
        session.install("coverage>=7.10")
        session.run("python", "tests/accelerator/lines.py")
        return
    chosen = ("-m", "accelerator", "tests/accelerator")
    session.run("python", "-m", "pytest", *chosen, *session.posargs)


@nox.session
def slurm(session: nox.Session) -> None:
    """Studies on a real SLURM, which has to be there (`slurm-wlm` and `munge`); needs root."""
    session.install(*CONSTRAINED, "-e", ".[lightning,test]")
    session.run("python", "-m", "pytest", "tests/engines/test_slurm.py", "-rs", *session.posargs)


@nox.session
def pods(session: nox.Session) -> None:
    """A pod as a kubelet runs it, and hosts that share a bucket of S3 and no folder."""
    session.install(*CONSTRAINED, "-e", ".[lightning,test,remote]")
    session.install(*CONSTRAINED, "moto[server]", "kubernetes-validate", "pyyaml")
    chosen = ("tests/acceptance/test_kubernetes.py", "tests/acceptance/test_remote.py")
    session.run("python", "-m", "pytest", *chosen, "-rs", *session.posargs)


@nox.session
def ray(session: nox.Session) -> None:
    """Studies on a real cluster of Ray of three nodes."""
    session.install(*CONSTRAINED, "-e", ".[lightning,test]")
    session.install("ray[default]>=2.40")
    session.run("python", "-m", "pytest", "tests/engines/test_ray.py", "-rs", *session.posargs)


@nox.session
def peers(session: nox.Session) -> None:
    """Optuna's and Lightning's own tests, without and with Hermes: `nox -s peers -- FOLDER`."""
    session.install(*CONSTRAINED, "-e", ".[lightning,test,peers]")
    session.run("python", "tests/peers/compare.py", *session.posargs)


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
