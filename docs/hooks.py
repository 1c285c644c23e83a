"""What `make docs` adds to docs/: the home page, the changes, and the two references.

mkdocs calls `on_files` and `on_page_markdown`. Both references are read from the code itself: the
help of every command, the signature and docstring of every public name.
"""

import importlib
import inspect
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from featcal.cli.app import group

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
MOVED = {  # files of the repository that are pages of the site
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
MODULES = ("", ".arrays", ".metrics", ".losses", ".export", ".bridges.sklearn", ".bridges.ray")
LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s:]+)(#[^)\s]*)?\)")
SECTIONS = ("Args", "Returns", "Yields", "Raises", "Attributes")


def on_files(files: "Files", config: "MkDocsConfig") -> "Files":
    """Adds the pages that are not in docs/."""
    from mkdocs.structure.files import File

    pages = {page: (ROOT / name).read_text() for name, page in MOVED.items()}
    pages |= {"cli-reference.md": commands(), "api.md": api()}
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: "Page", **_: object) -> str:
    """Turns links that hold in the repository into links of the site, and pipes in code into pipes.

    In a table of the repository a pipe inside code is escaped; here it would show its backslash.
    """
    home = ROOT if page.file.src_uri in MOVED.values() else ROOT / "docs"

    def relinked(found: re.Match[str]) -> str:
        words, target, anchor = found[1], found[2], found[3] or ""
        path = os.path.relpath(home / target, ROOT)
        if path in MOVED:
            return f"[{words}]({MOVED[path]}{anchor})"
        if path.startswith("docs/"):
            return f"[{words}]({path.removeprefix('docs/')}{anchor})"
        return f"{words} (`{path}`)" if words != path else f"`{path}`"  # in the repository alone

    lines = LINK.sub(relinked, markdown).split("\n")
    code = re.compile(r"`[^`]+`")
    return "\n".join(
        code.sub(lambda one: one[0].replace("\\|", "|"), line) if line.startswith("|") else line
        for line in lines
    )


def commands() -> str:
    """The help of every command, as a terminal shows it."""
    parts = ["# Every command\n\nWhat `featcal COMMAND --help` prints.\n"]

    def add(command: click.Command, words: str, parent: click.Context | None) -> None:
        context = click.Context(command, info_name=words.split()[-1], parent=parent)
        if parent is not None:
            parts.append(f"## {words}\n\n```text\n{command.get_help(context)}\n```\n")
        if isinstance(command, click.Group):
            for name in command.list_commands(context):
                found = command.get_command(context, name)
                assert found is not None
                add(found, f"{words} {name}", context)

    add(group, "featcal", None)
    return "\n".join(parts)


def api() -> str:
    """Signature and docstring of every public name."""
    parts = ["# The Python interface\n"]
    for ending in MODULES:
        module = importlib.import_module(f"featcal{ending}")
        parts.append(f"## featcal{ending}\n")
        for name in getattr(module, "__all__", [k for k in vars(module) if k[0] != "_"]):
            thing = getattr(module, name)
            if getattr(thing, "__module__", "").startswith(module.__name__):
                parts += described(thing, name, "###")
    return "\n".join(parts)


def described(thing: Any, name: str, level: str) -> list[str]:  # noqa: ANN401 - any object
    """A heading, the call and the docstring; of a class also its public methods."""
    call = name
    if callable(thing) and not (inspect.isclass(thing) and issubclass(thing, BaseException)):
        found = inspect.signature(thing)
        arguments = [shown(one) for one in found.parameters.values() if one.name != "self"]
        call += str(found.replace(parameters=arguments, return_annotation=inspect.Signature.empty))
    parts = [f"{level} {name}\n", f"```python\n{call}\n```\n", prose(inspect.getdoc(thing) or "")]
    if inspect.isclass(thing):
        for key, member in vars(thing).items():
            own = getattr(thing, key) if not key.startswith("_") else None
            if inspect.isroutine(own) and inspect.getdoc(own) and member is not None:
                parts += described(own, f"{name}.{key}", level + "#")
    return parts


class Plain(str):
    """A text that is shown without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def shown(one: inspect.Parameter) -> inspect.Parameter:
    """An argument whose annotation and default read as in the source."""
    empty = inspect.Parameter.empty
    kind, value = one.annotation, one.default
    if value is not empty and " at 0x" in repr(value):
        value = Plain("...")
    return one.replace(annotation=Plain(kind) if isinstance(kind, str) else kind, default=value)


def prose(doc: str) -> str:
    """A docstring in Google's style as Markdown."""
    lines = []
    for line in doc.splitlines():
        section = line.removesuffix(":") in SECTIONS and line.endswith(":")
        item = re.match(r"    (\w+): (.*)", line)
        if section:
            lines += [f"**{line}**", ""]
        elif item:
            lines.append(f"- `{item[1]}`: {item[2]}")
        elif line.startswith("        "):
            lines.append("  " + line.strip())
        else:
            lines.append(line)
    text = "\n".join(lines)
    return (
        re.sub(r"((?:^(?:>>>|\.\.\.) .*\n?(?:^(?!>>>|$).+\n?)*)+)", fenced, text, flags=re.M) + "\n"
    )


def fenced(found: re.Match[str]) -> str:
    """A doctest as a block of code."""
    return f"\n```pycon\n{found[1].rstrip()}\n```\n"
