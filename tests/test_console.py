"""Progress and tables: a bar for people, lines for log files, nothing when quiet."""

import io
import json
import sys
import time
from collections.abc import Iterator
from datetime import datetime

import pytest
from rich.console import Console, RenderableType
from rich.text import Text

from ease import console
from ease.console import (
    as_text,
    labelled,
    megabytes,
    plain,
    print_left_out,
    rounds_bar,
    status,
    table,
    with_progress,
)
from ease.errors import UserError
from ease.show.notebook import as_html


@pytest.fixture(params=[True, False], ids=["terminal", "log file"])
def shown(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Console:
    made = Console(file=io.StringIO(), force_terminal=request.param, width=120)
    monkeypatch.setattr(console, "errors", made)
    return made


def text(shown: Console) -> str:
    assert isinstance(shown.file, io.StringIO)
    return shown.file.getvalue()


def test_rounds_are_counted_from_where_the_run_stood(shown: Console) -> None:
    with rounds_bar("training", 5, done=3) as bar:
        bar.step(loss="0.5", clients="10")
    assert "training" in text(shown) and "4/5" in text(shown) and "loss 0.5  clients 10" in text(shown)


@pytest.mark.parametrize("note", [{"phase": "decomposition", "forget R@1": "16.7"}, {"clients": "10", "loss": "3.099"}])
def test_a_screen_of_80_columns_shows_the_figures(monkeypatch, note: dict[str, str]) -> None:
    """They are what the line is read for; the bar gives way."""
    made = Console(file=io.StringIO(), force_terminal=True, width=80)
    monkeypatch.setattr(console, "errors", made)
    with rounds_bar("retrain  ", 20, done=9) as bar:
        bar.step(**note)
    assert "  ".join(f"{name} {value}" for name, value in note.items()) in text(made)


def test_slow_rounds_have_a_time_left_too(shown: Console, monkeypatch) -> None:
    """Two of five rounds in 200 seconds leave 300: five minutes."""
    clock = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(shown, "get_time", lambda: clock[0])
    with rounds_bar("grid", 5, first="training") as bar:
        for _ in range(2):
            clock[0] += 100
            bar.step(done="EASE")
    assert "0:05:00" in text(shown) and ("training" in text(shown)) == shown.is_terminal


def test_the_last_round_leaves_no_time(shown: Console) -> None:
    with rounds_bar("grid", 1) as bar:
        bar.step(done="EASE")
    assert shown.is_terminal or text(shown) == "grid 1/1  done EASE\n"


def test_fewer_or_more_rounds_than_usual_end_as_all_of_them(shown: Console) -> None:
    for rounds in (3, 6):
        with rounds_bar("ease", 5) as bar:
            for _ in range(rounds):
                bar.step()
            bar.end()
    assert "6/6" in text(shown) and "6/5" not in text(shown)
    assert "3/3" in text(shown) or not shown.is_terminal


def test_quiet_shows_nothing(shown: Console) -> None:
    with rounds_bar("training", 5, quiet=True) as bar:
        bar.step(loss="0.5")
    assert text(shown) == ""


def test_after_an_error_no_bar_is_left(shown: Console) -> None:
    with pytest.raises(UserError), rounds_bar("training", 5):
        raise UserError("x")
    last = text(shown).rpartition("\n")[2]
    assert text(shown) == "" or last.endswith("\x1b[2K") or "training" not in last


@pytest.mark.parametrize("quiet", [True, False])
def test_long_work_shows_how_far_it_is_even_next_to_a_spinner(shown: Console, monkeypatch, quiet: bool) -> None:
    monkeypatch.setattr(console, "SECONDS_BEFORE_PROGRESS", -1.0)
    with status("preparing", quiet):
        for item in with_progress("abcde", 5, "Counting"):
            # The screen is drawn anew every 0.08 seconds, on a busy machine later.
            until = time.monotonic() + (10 if shown.is_terminal else 0.3)
            while item == "d" and "3/5" not in text(shown) and time.monotonic() < until:
                time.sleep(0.02)
    assert ("Counting" in text(shown) and "3/5" in text(shown)) == shown.is_terminal


def test_short_work_shows_nothing(shown: Console) -> None:
    assert list(with_progress("abc", 3, "Spelling")) == ["a", "b", "c"] and text(shown) == ""


def test_a_table_keeps_its_rows() -> None:
    made = Console(file=io.StringIO(), width=80)
    made.print(table("Title", ["", "R@1"], [["seen", "90.0"], ["unseen", "10.0"]], caption="of 12 pairs"))
    assert isinstance(made.file, io.StringIO)
    for part in ("Title", "seen", "unseen", "90.0", "of 12 pairs"):
        assert part in made.file.getvalue()


def test_a_table_that_is_too_wide_breaks_text_and_cuts_nothing() -> None:
    """Every character of every cell is there, numbers are whole, and an id that has room is too."""
    ids, words, band = "sample-f1af89b203/ease", "rank of retained pairs, " * 4, "1.124..3.314"
    for columns, row, count in (
        (["", "before", "answer", "retrain", "band", ""], [words, "0.7", "0.9", "2.1", band, "outside"], 1),
        (["request", "state", "result", "retain R@1 before", "after"], ["bo", "held", ids, band, "x" * 60], 3),
        (["id", "why"], [ids, "y" * 200], 2),
    ):
        made = Console(file=io.StringIO(), width=80)
        made.print(table("Title", columns, [row], text_columns=count))
        assert isinstance(made.file, io.StringIO)
        lines = made.file.getvalue().splitlines()
        assert max(map(len, lines)) <= 80 and "…" not in made.file.getvalue()
        body = [line.strip("│").split("│") for line in lines if line.startswith("│")]
        shown = ["".join(line[place].strip() for line in body) for place in range(len(row))]
        assert shown == [cell.replace(" ", "") if cell == words else cell for cell in row] or [
            each.replace(" ", "") for each in shown
        ] == [cell.replace(" ", "") for cell in row]
        assert any(row[0] in line or row[0] == words for line in lines)
        assert any(band in line for line in lines) or band not in row


def test_brackets_are_shown_as_they_are_and_styles_stay() -> None:
    """`[ours]` would be taken for a style, and `[/x]` for the end of one."""
    made = Console(file=io.StringIO(), width=80, force_terminal=True, color_system="standard")
    cells = [["EASE [ours]", Text("best", "bold")]]
    made.print(table("runs/[/x]", ["", "R@1 [red]"], cells, caption="of [12] pairs [dim]"))
    shown = made.file.getvalue()
    for part in ("EASE [ours]", "runs/[/x]", "R@1 [red]", "of [12] pairs [dim]", "\x1b[1m     best\x1b[0m"):
        assert part in shown


def test_lines_of_a_summary_are_shown_as_they_are_and_whole() -> None:
    class Summary:
        def render(self) -> Iterator[RenderableType]:
            yield f"written to runs/[ours]/{'x' * 120}"
            yield labelled("note", f"kept in [/x]/{'y' * 120}", "yellow")

    assert as_text(Summary()).splitlines() == [
        f"written to runs/[ours]/{'x' * 120}",
        f"note: kept in [/x]/{'y' * 120}",
    ]


def test_notes_of_progress_are_shown_as_they_are(shown: Console) -> None:
    with rounds_bar("grid [quick]", 5) as bar:
        bar.step(done="EASE [ours] [/x]")
    assert "EASE [ours] [/x]" in text(shown) and "grid [quick]" in text(shown)


def test_megabytes() -> None:
    assert megabytes(1_250_000) == "1.2 MB"


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What rich takes for a notebook, and what it would show in the cell of its own accord."""
    seen: list[str] = []
    monkeypatch.setenv("FORCE_COLOR", "1")  # as Jupyter's kernel sets it
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("rich.jupyter.display", lambda segments, text: seen.append(text))
    return seen


def test_a_summary_is_shown_once_in_a_notebook(notebook: list[str]) -> None:
    """Making its text and its HTML shows nothing by itself; the notebook shows one of the two."""

    class Summary:
        def render(self) -> Iterator[RenderableType]:
            yield table("numbers", ["", "R@1"], [["forget", "12.5"]])

    assert "12.5" in as_text(Summary()) and "<td" in as_html(Summary())
    assert notebook == []


def test_a_notebook_gets_plain_lines(notebook: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """No bar that is drawn anew, which a cell would keep every state of."""
    made = console.stream(stderr=True)
    assert not made.is_terminal
    made.print("training 1/5")
    assert capsys.readouterr().err == "training 1/5\n" and notebook == []


def test_clients_left_out_are_printed_unchanged_on_the_error_stream(capsys) -> None:
    print_left_out("round 3", {7: "it failed with [red]Error"}, quiet=False)
    print_left_out("round 4", {7: "it is late"}, quiet=True)
    reported = capsys.readouterr()
    assert reported.err == "round 3: without client 7: it failed with [red]Error\n" and reported.out == ""


# --- names of strangers ---

NAME = "a\x1b[31mred\x1b]0;title\x07\r\n\x85\u2028\u202egnp\u2066\ud800\x9bé\u200d图"
SHOWN = r"a\x1b[31mred\x1b]0;title\x07\r\n\x85\u2028\u202egnp\u2066\ud800\x9bé" + "\u200d图"


def test_terminal_controls_are_escaped() -> None:
    assert plain(NAME) == SHOWN and plain(SHOWN) == SHOWN
    assert plain("a b\u00a0c \\ é 图 👩\u200d🚀 [x]") == "a b\u00a0c \\ é 图 👩\u200d🚀 [x]"


@pytest.mark.parametrize("terminal", [True, False])
def test_no_name_steers_the_terminal_wherever_it_is_printed(terminal: bool, monkeypatch) -> None:
    made = console.Screen(file=io.StringIO(), force_terminal=terminal, width=300, color_system=None)
    monkeypatch.setattr(console, "errors", made)

    class Summary:
        def render(self) -> Iterator[RenderableType]:
            yield f"written to {NAME}"
            yield labelled("note", NAME)
            yield table(NAME, ["", NAME], [[NAME, Text("styled \x1b[5m")]], caption=f"of {NAME}")
            yield Text(f"bare {NAME}")

    console.show(Summary(), made)
    made.print(f"printed {NAME}")
    with rounds_bar(f"bar {NAME}", 3) as bar:
        bar.step(done=NAME)
    with status(f"busy {NAME}", quiet=False):
        pass
    written = text(made)
    assert "\x1b[31m" not in written and "\x1b]0" not in written and "\x1b[5m" not in written
    assert not set("\x07\x85\u2028\u202e\u2066\ud800\x9b") & set(written)
    for place in ("written to ", "note: ", "bar "):
        assert place + SHOWN in written, place
    assert as_text(Summary()).count("\x1b") == 0


def test_logs_are_lines_of_json_with_dates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever prints to the error stream, in pieces too; events keep their values."""
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    console.log_as_json()
    console.log_as_json()  # once is enough
    print("a line\nand", "a half", file=sys.stderr)
    console.errors.print("round 1/3", markup=False)
    console.log_event("answered", path="/queue", status=200)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [each["event"] for each in lines] == ["a line", "and a half", "round 1/3", "answered"]
    assert lines[-1]["status"] == 200
    assert all(datetime.fromisoformat(each["time"]).tzinfo is not None for each in lines)
