"""HTML for notebooks: escaped, without scripts, in the page's colours. Pure (no I/O)."""

from collections.abc import Iterable
from contextlib import suppress
from html import escape
from typing import Any

from dataload.errors import printable

_LINE = "white-space:pre-wrap;font-family:monospace"
_CELL = "text-align:left;padding:.1em 1em .1em 0;color:inherit;background:transparent"


def html_table(
    title: str, lines: Iterable[str], columns: Iterable[str] = (), rows: Iterable[Iterable[Any]] = ()
) -> str:
    """Return a title, lines of text and a table (omitted without rows), all escaped."""

    def row(tag: str, cells: Iterable[Any]) -> str:
        return "<tr>" + "".join(f'<{tag} style="{_CELL}">{_text(cell)}</{tag}>' for cell in cells) + "</tr>"

    said = "".join(f'<div style="{_LINE}">{_text(line)}</div>' for line in lines)
    body = "".join(row("td", cells) for cells in rows)
    table = f"<table><thead>{row('th', columns)}</thead><tbody>{body}</tbody></table>" if body else ""
    return f"<div><strong>{_text(title)}</strong>{said}{table}</div>"


def html_of_source(source: Any) -> str | None:
    """Return the size and fields of a source; None if they are unavailable, so that notebooks show its `repr`."""
    with suppress(Exception):  # it may be closed
        return html_table(repr(source), [f"{len(source):,} records"], ("field", "type"), source.fields.items())
    return None


def _text(value: Any) -> str:
    return escape(printable(str(value), None))
