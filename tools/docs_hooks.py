"""What MkDocs calls while it builds the site: references are made from the commands and the settings themselves."""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import msgspec

SETTINGS = re.compile(r"<!-- settings ([\w.]+):(\w+) -->")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Put the reference of every command, and tables of settings, in the place of their comments."""
    markdown = SETTINGS.sub(lambda found: settings_table(found[1], found[2]), markdown)
    if "<!-- commands -->" not in markdown:
        return markdown
    from brokerless.cli.main import app

    text = app.generate_docs(include_hidden=False, heading_level=3)
    return markdown.replace("<!-- commands -->", text)


def settings_table(module: str, name: str) -> str:
    """A table of the fields of a Struct: what it is, its type, default and meaning, as they are in the source."""
    rows = ["| setting | type | default | meaning |", "| --- | --- | --- | --- |"]
    for field, kind, default, meaning in settings(getattr(importlib.import_module(module), name)):
        shown = [f"`{field}`", f"`{kind}`", f"`{default}`" if default else "must be given", meaning]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in shown) + " |")
    return "\n".join(rows)


def settings(struct: type) -> Iterator[tuple[str, str, str, str]]:
    """Name, type, default and meaning of each field, those of base classes first."""
    for base in struct.__bases__:
        if getattr(base, "__struct_fields__", ()):
            yield from settings(base)
    defaults = {field.name: field for field in msgspec.structs.fields(struct)}
    source = inspect.getsource(struct)
    lines = source.splitlines()
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign):
            name = ast.unparse(node.target)
            yield name, ast.unparse(node.annotation), _default(defaults[name]), _meaning(node, after, lines)


def _default(field: msgspec.structs.FieldInfo) -> str:
    """As a file would have it; empty for a field that must be given."""
    value = (
        field.default_factory()
        if field.default is msgspec.NODEFAULT and not field.required
        else field.default
    )
    if value is msgspec.NODEFAULT:
        return ""
    return type(value).__name__ if isinstance(value, msgspec.Struct) else msgspec.json.encode(value).decode()


def _meaning(node: ast.AnnAssign, after: ast.stmt | None, lines: list[str]) -> str:
    """The string below a field, or the comments above and beside it."""
    if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
        return " ".join(str(after.value.value).split())
    above = node.lineno - 1
    while lines[above - 1].strip().startswith("# "):
        above -= 1
    beside = [line.partition("  # ")[2] for line in lines[node.lineno - 1 : node.end_lineno]]
    comments = [line.strip()[2:] for line in lines[above : node.lineno - 1]] + beside
    return re.sub(r"^\s*noqa: \w+\s*#?", "", " ".join(comments)).strip()
