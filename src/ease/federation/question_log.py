"""Log of the questions that a node received, at its own site: one line each, whatever the outcome."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ease.errors import UserError
from ease.federation.codec import JobHeader
from ease.federation.container import PREFIX
from ease.federation.wire import Ask
from ease.storage import write_atomic

LARGEST = 1 << 24
"""Bytes of the list; when it is longer, its older half is replaced by totals."""
LONGEST_TEXT = 300
"""Characters of a reason or a name: the server chooses how long they are."""


@dataclass(frozen=True)
class QuestionLog:
    """The list in the folder of a node."""

    path: Path

    def note(self, ask: Ask, job: bytes, parts: Mapping[str, bytes], reply: bytes, refused: str) -> None:
        """Add one line. It holds no id and no number of the site, so that it may be shown to anyone there."""
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "kind": ask.kind,
            "run": ask.run,
            "cohort": ask.cohort,
            "bytes_in": len(job) + sum(map(len, parts.values())),
            "bytes_out": len(reply),
            "refused": refused[:LONGEST_TEXT],
            **_of_job(job),
            **({} if ask.search is None else {"words": ask.search.words}),
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.is_file() and self.path.stat().st_size > LARGEST:
            self._shorten()
        with self.path.open("a") as file:
            file.write(json.dumps(line, sort_keys=True) + "\n")

    def _shorten(self) -> None:
        """Replace the older half by totals, so that no flood of questions hides the ones before it."""
        lines = self.lines()
        older, newer = lines[: len(lines) // 2], lines[len(lines) // 2 :]
        totals = dict[tuple[str, bool], dict[str, Any]]()
        for each in older:
            key = each["kind"], bool(each["refused"])
            if key not in totals:
                refused = "refused for several reasons" if each["refused"] else ""
                totals[key] = {**each, "refused": refused, "times": 0, "bytes_in": 0, "bytes_out": 0, "run": ""}
                for name in ("objective", "words", "words_mark", "round", "data", "replays", "named_pairs"):
                    totals[key].pop(name, None)
            total = totals[key]
            total["times"] += each.get("times", 1)
            total["bytes_in"] += each["bytes_in"]
            total["bytes_out"] += each["bytes_out"]
            total["cohort"] = min(total["cohort"], each["cohort"])
        kept = [*totals.values(), *newer]
        write_atomic(self.path, "".join(json.dumps(each, sort_keys=True) + "\n" for each in kept).encode())

    def mark_words(self, run: str, mark: Callable[[str], str]) -> int:
        """Put marks in place of the words that were searched for in a run; returns the number of changed lines."""
        if not self.path.is_file():
            return 0
        lines, changed = self.lines(), 0
        for line in lines:
            if line.get("run") == run and "words" in line:
                line["words_mark"] = mark(line.pop("words"))
                changed += 1
        if changed:
            write_atomic(self.path, "".join(json.dumps(line, sort_keys=True) + "\n" for line in lines).encode())
        return changed

    def lines(self) -> list[dict[str, Any]]:
        if not self.path.is_file():
            raise UserError(f"{self.path}: no such file; name the folder of a node that was asked something (--folder)")
        try:
            return [json.loads(line) for line in self.path.read_text().splitlines()]
        except ValueError as error:
            raise UserError(f"{self.path}: damaged ({str(error)[:100]}); move it away to begin a new one") from error


def question_log(folder: Path) -> QuestionLog:
    return QuestionLog(folder / "questions.jsonl")


def _of_job(job: bytes) -> dict[str, Any]:
    """The fields of a job, if it can be read; an unreadable job is refused anyway."""
    if len(job) <= PREFIX.size:
        return {}
    try:
        _, _, length, _ = PREFIX.unpack_from(job)
        header = JobHeader.model_validate_json(job[PREFIX.size : PREFIX.size + length]).model_dump()
    except ValueError:
        return {}
    named = header["request"]
    return {
        **{name: header[name] for name in ("round", "data")},
        "objective": header["objective"][:LONGEST_TEXT],
        "replays": len(header["replays"]),
        "named_pairs": len(named["ids"]) if named is not None and named["scope"] == "sample" else None,
    }
