"""The map in CONTRIBUTING.md, held against the tree."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "optuna_hermes"
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
TABLE = PAGE.partition("## Where things are")[2].partition("Beside the package")[0]
ROWS = dict(re.findall(r"^\| (`.*?) \| (.*) \|$", TABLE, re.MULTILINE))


def test_every_module_is_in_one_row() -> None:
    """A newcomer finds the room of each file from the table alone."""
    named = [name for rooms in ROWS for name in re.findall(r"`([^`]+)`", rooms)]
    there = [
        f"{each.name}/" if each.is_dir() else each.name
        for each in PACKAGE.iterdir()
        if each.suffix == ".py" or (each / "__init__.py").exists()
    ]
    assert sorted(named) == sorted(set(there) - {"__init__.py"})


def test_every_room_within_a_room_is_named() -> None:
    """Rooms with rooms in them say what these are for."""
    for rooms, purpose in ROWS.items():
        for name in re.findall(r"`(\w+)/`", rooms):
            within = {each.parent.name for each in (PACKAGE / name).glob("*/__init__.py")}
            assert within <= set(re.findall(r"`(\w+)/`", purpose)), name


def test_the_diagram_is_what_lint_checks() -> None:
    """The layers on the page are those of the contract."""
    (diagram,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    settings = (ROOT / "pyproject.toml").read_text()
    whole = settings.partition('containers = ["optuna_hermes"]')[2]
    layers = re.findall(r"^layers = \[(.*?)^\]", whole, re.DOTALL | re.MULTILINE)[0]
    assert diagram.splitlines() == re.findall(r'"(.*)"', re.sub(r"[()]", "", layers))


def test_every_file_that_a_recipe_names_is_there() -> None:
    """Recipes lead to files that exist, but for the one to be written."""
    recipes = PAGE.partition("## Add a policy")[2].partition("## Tests")[0]
    for name in re.findall(r"`([\w/]+\.py)`", recipes):
        places = (ROOT / name, PACKAGE / name, *PACKAGE.rglob(Path(name).name))
        assert Path(name).stem in ("name", "_name", "test_name", "test_cli_name") or any(
            place.exists() for place in places
        ), name


def test_each_way_through_the_code_is_a_page_long() -> None:
    """The two ways that matter name at most 12 files each, all of which are there."""
    page = (ROOT / "docs" / "how-it-works.md").read_text()
    ways = re.findall(r"^## In the code: .*?(?=^## )", page, re.MULTILINE | re.DOTALL)
    assert len(ways) == 2
    for way in ways:
        files = set(re.findall(r"`([\w/]+\.py)`", way))
        assert 5 < len(files) <= 12
        assert [name for name in files if not (PACKAGE / name).exists()] == []
