"""The page's templates: whatever is not markup already is escaped, and a name that is not there is an error."""

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

ENVIRONMENT = Environment(
    loader=PackageLoader("ease.show"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


def render(name: str, /, **values: Any) -> Markup:
    return Markup(ENVIRONMENT.get_template(name).render(values))


def source(name: str) -> str:
    """A file that goes into the page as it is."""
    assert ENVIRONMENT.loader is not None
    return ENVIRONMENT.loader.get_source(ENVIRONMENT, name)[0]


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


def fixed(value: float | None, digits: int) -> str:
    """A number with so many decimals; nothing for none."""
    return "" if value is None else f"{value:.{digits}f}"


ENVIRONMENT.filters |= {"sentence": sentence, "fixed": fixed}
