"""Sections of a report, written as Markdown or as one HTML page that needs nothing else."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:80em;padding:0 1em;color:#1a1a1a;background:#fff}"
    "div{overflow-x:auto}table{border-collapse:collapse;margin:1em 0}th,td{padding:.25em .7em;border-bottom:1px solid #ccc;"
    "white-space:nowrap}td.number{text-align:right;font-variant-numeric:tabular-nums}th{text-align:left}"
    "@media(prefers-color-scheme:dark){body{color:#e6e6e6;background:#161616}th,td{border-color:#444}}"
)


@dataclass(frozen=True)
class Section:
    """A table under a title (the first has none) with ``notes`` behind it. ``texts``: so many columns in front are no numbers."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    texts: int = 2


def markdown(sections: Sequence[Section]) -> str:
    """Sections under headings of the third level."""
    return "\n\n".join(_markdown(section) for section in sections) + "\n"


def _markdown(section: Section) -> str:
    ruler = ["---"] * section.texts + ["---:"] * (len(section.heads) - section.texts)
    lines = [f"### {section.title}\n"] if section.title else []
    lines += ["| " + " | ".join(row) + " |" for row in (section.heads, ruler, *section.rows)]
    return "\n".join(lines) + ("\n\n" + "\n".join(f"- {note}" for note in section.notes) if section.notes else "")


def html(title: str, sections: Sequence[Section]) -> str:
    """The same as a page. Of Markdown in notes it knows code and bold."""
    body = "".join(_html(section) for section in sections)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><h1>{escape(title)}</h1>\n{body}</body></html>\n"
    )


def _html(section: Section) -> str:
    def cell(at: int, text: str) -> str:
        return f"<td>{escape(text)}</td>" if at < section.texts else f'<td class="number">{escape(text)}</td>'

    title = f"<h2>{escape(section.title)}</h2>\n" if section.title else ""
    heads = "".join(f"<th>{escape(head)}</th>" for head in section.heads)
    rows = "".join("<tr>" + "".join(cell(at, text) for at, text in enumerate(row)) + "</tr>\n" for row in section.rows)
    notes = "".join(f"<li>{_inline(note)}</li>\n" for note in section.notes)
    table = f"<div><table><thead><tr>{heads}</tr></thead><tbody>\n{rows}</tbody></table></div>\n"
    return title + table + (f"<ul>{notes}</ul>\n" if notes else "")


def _inline(text: str) -> str:
    text = escape(text)
    for sign, tag in ((r"\*\*(.+?)\*\*", "strong"), (r"`(.+?)`", "code")):
        text = re.sub(sign, rf"<{tag}>\1</{tag}>", text)
    return text
