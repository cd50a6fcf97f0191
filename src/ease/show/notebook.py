"""Summaries of commands as HTML for notebooks: real tables, which can be selected, sorted and copied."""

from html import escape
from io import StringIO

from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ease.console import Screen, Shown, as_text, plain

LEFT = "text-align:left"
RIGHT = "text-align:right"


def as_html(shown: Shown) -> str:
    """A summary as HTML: its tables as tables, its lines as paragraphs."""
    return "\n".join(map(_part, shown.render()))


def _part(part: RenderableType) -> str:
    if isinstance(part, Table):
        return _table(part)
    if isinstance(part, Panel):
        title = f"<strong>{_words(part.title)}</strong><br>" if part.title else ""
        return f"<p>{title}{_words(part.renderable)}</p>"
    return f"<p>{_words(part)}</p>"


def _table(table: Table) -> str:
    """Every column keeps its alignment; title above, caption below."""
    aligned = [RIGHT if column.justify == "right" else LEFT for column in table.columns]
    heads = "".join(
        f'<th scope="col" style="{style}">{_markup(column.header)}</th>'
        for style, column in zip(aligned, table.columns, strict=True)
    )
    rows = "".join(
        "<tr>"
        + "".join(f'<td style="{s}">{_words(cell)}</td>' for s, cell in zip(aligned, cells, strict=True))
        + "</tr>"
        for cells in zip(*(column.cells for column in table.columns), strict=True)
    )
    title = f'<caption style="caption-side:top;{LEFT}"><strong>{_markup(table.title)}</strong></caption>'
    below = f"<p><small>{_markup(table.caption)}</small></p>" if table.caption else ""
    return f"<table>{title}<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>{below}"


def _markup(text: object) -> str:
    """A title, caption or heading, in which brackets are escaped for the terminal."""
    return _lines((Text.from_markup(text) if isinstance(text, str) else text).plain) if text else ""  # type: ignore[attr-defined]


def _words(part: object) -> str:
    """A cell or a line; what is bold stays bold."""
    if isinstance(part, str):
        return _lines(plain(part))
    if isinstance(part, Text):
        found = _lines(part.plain)
        return f"<strong>{found}</strong>" if part.style == "bold" else found
    screen = Screen(width=100, record=True, file=StringIO(), force_jupyter=False)
    screen.print(part)
    return f"<pre>{escape(screen.export_text().rstrip())}</pre>"


def _lines(text: str) -> str:
    return escape(text.rstrip()).replace("\n", "<br>")


class Shows:
    """Shows a summary: one line as `repr`, the command's output as `str`, tables in a notebook."""

    summary: Shown

    @property
    def line(self) -> str:
        """What it is in a few words."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.line}>"

    def __str__(self) -> str:
        return as_text(self.summary)

    def _repr_html_(self) -> str:
        return as_html(self.summary)
