"""Docstrings, comments and messages of the package are plain English."""

from tests.test_language import LANGUAGE


def test_no_docstring_comment_or_message_uses_a_banned_construction() -> None:
    found = {path.name: LANGUAGE.findings(LANGUAGE.prose(path.read_text())).banned for path in LANGUAGE.modules()}
    assert not {name: banned for name, banned in found.items() if banned}, "python recipes/language.py --source --list"


def test_prose_of_a_module_is_its_docstrings_comments_and_messages() -> None:
    source = '"""It is told."""\nx = f"{y} goes on"  # as nobody comes back\nprint("no")\n'
    found = {name for name, _ in LANGUAGE.findings(LANGUAGE.prose(source)).banned}
    assert found == {"comes back", "tells, is told", "goes on, go on"}
