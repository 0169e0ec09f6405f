"""Parts of the site that are no pages of ``docs``: the README and its like, the command line.

Pages link to files of the repository as they lie there, so that they can be read there too. Here
those files become pages of the site, and the links follow.
"""

from __future__ import annotations

import inspect
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from optuna_hermes.cli._app import GROUPS, VERBS, app

ROOT = Path(__file__).parents[2]
TEXTS = ("README.md", "CHANGELOG.md", "SECURITY.md", "CONTRIBUTING.md")
BESIDE = ("LICENSE", "constraints.txt", "benchmarks/**/*", "examples/**/*", "integrations/**/*")
"""Other files that pages link to."""

_LINK = re.compile(r"(\]\()([^)\s]+)(\))")
_FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Add what is written elsewhere, and what is made from the code."""
    for name in TEXTS:
        place = "index.md" if name == "README.md" else name
        files.append(File.generated(config, place, content=(ROOT / name).read_text()))
    for path in _beside():
        name = str(path.relative_to(ROOT))
        if files.get_file_from_path(name) is None:
            files.append(File.generated(config, name, abs_src_path=str(path)))
    content = "\n".join(_command_line())
    files.append(File.generated(config, "reference-cli.md", content=content))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Let links lead to where a file of the repository is on the site."""
    source = _in_repository(page.file.src_uri)

    def moved(match: re.Match[str]) -> str:
        begin, target, end = match.groups()
        if re.match(r"[a-z]+:|#", target):
            return match.group()
        path, mark, anchor = target.partition("#")
        there = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        here = posixpath.dirname(page.file.src_uri) or "."
        return f"{begin}{posixpath.relpath(_on_site(there), here)}{mark}{anchor}{end}"

    parts = _FENCED.split(markdown)
    fences = _FENCED.findall(markdown)
    texts = [_LINK.sub(moved, part) for part in parts]
    return "".join(text + fence for text, fence in zip(texts, [*fences, ""], strict=True))


def _beside() -> Iterator[Path]:
    for pattern in BESIDE:
        for path in sorted(ROOT.glob(pattern)):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path


def _in_repository(uri: str) -> str:
    """Return the path in the repository of a page of the site."""
    if uri == "index.md":
        return "README.md"
    return uri if (ROOT / uri).exists() and uri != "README.md" else f"docs/{uri}"


def _on_site(path: str) -> str:
    """Return the path on the site of a file of the repository; a folder is its README."""
    if (ROOT / path).is_dir():
        path = posixpath.join(path, "README.md")
    return "index.md" if path == "README.md" else path.removeprefix("docs/")


def _command_line() -> Iterator[str]:
    """A section for each verb, as ``--help`` has it."""
    group: Any = typer.main.get_command(app)
    yield "# Command line\n"
    yield "Made from the program's own `--help`, which every verb has; those that print facts have"
    yield "`--json`. The exit status is 0, 1 for a failure, 2 for bad input, 3 if no trial has"
    yield "succeeded, 75 if all is suspended, 130 after Ctrl-C.\n"
    commands = {name: group.commands[name] for name in VERBS}
    for name in GROUPS:
        inner = group.commands[name].commands
        commands |= {f"{name} {each}": command for each, command in inner.items()}
    for name, command in commands.items():
        text = inspect.cleandoc(command.help or "")
        yield f"## {name}\n"
        yield from _paragraphs(text)
        yield "| option | what it says |\n|---|---|"
        yield from (_row(each) for each in command.params if each.name != "help")
        yield ""
    yield f"## Optuna's own verbs\n\n{inspect.cleandoc(app.info.epilog or '')}\n"


def _paragraphs(text: str) -> Iterator[str]:
    """Help as Markdown: what stands behind a ``\\b`` are commands."""
    for paragraph in text.split("\n\n"):
        if paragraph.startswith("\b"):
            _, *lines = paragraph.strip("\b\n").splitlines()
            yield "```console\n" + "\n".join(_typed(lines)) + "\n```\n"
        else:
            yield f"{paragraph}\n"


def _typed(lines: list[str]) -> Iterator[str]:
    continued = False
    for line in lines:
        yield f"    {line.strip()}" if continued else f"$ {line.strip()}"
        continued = line.endswith("\\")


def _row(parameter: Any) -> str:
    """An option or an argument, what it is by default, and what it says."""
    names = [*parameter.opts, *parameter.secondary_opts]
    shown = " ".join([", ".join(names), parameter.metavar or ""]).strip()
    if parameter.param_type_name == "argument":
        shown = parameter.metavar or parameter.name.upper()
    words = [parameter.help or ""]
    if parameter.required:
        words.append("Required.")
    elif parameter.default not in (None, False, True) and not callable(parameter.default):
        words.append(f"Default: `{parameter.default}`.")
    if getattr(parameter, "envvar", None):
        words.append(f"Or by `${parameter.envvar}`.")
    return f"| `{shown}` | {' '.join(words)} |".replace("\n", " ")
