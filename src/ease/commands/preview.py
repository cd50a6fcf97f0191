"""`ease forget --dry-run`: shows what a request names, with captions and pictures, and lists its ids."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path

import numpy as np
from pydantic import Field
from rich.console import RenderableType

from ease.commands.train import warn_about_threads
from ease.config import Config
from ease.console import duration, errors, labelled, plain, status, table
from ease.methods.base import Unlearner
from ease.operations.ledger.impact import Impact, impact_of
from ease.requests.request import ClassRequest, Request, SampleRequest, in_words
from ease.runs.answers import StoredAnswer, answer_of, check_method, default_method, open_world, trained_of
from ease.runs.concepts import Match, class_words
from ease.runs.resolve import (
    RequestOptions,
    Resolved,
    check_options,
    check_request,
    named_ids,
    parse_request,
    request_id,
)
from ease.runs.run import Run
from ease.runs.world import World
from ease.seeding import generator
from ease.show.sheet import PRIVATE, Card, Row, data_address, sheet
from ease.storage import write_atomic

FOLDER = "previews"
SHOWN = 3
"""Example captions on the terminal."""
MOST_CARDS = 60
LONGEST_CAPTION = 72


class Preview(Config):
    """`ease forget --dry-run`: a request before anything is done for it."""

    run: Path
    id: str
    """The name of the request, as `--request` takes it."""
    request: Request
    meaning: str
    """The request in words. A pseudo-class is described by its most typical words."""
    ids: tuple[str, ...]
    """Pairs that are named."""
    impact: Impact
    names: dict[int, str]
    """Client -> its name."""
    examples: tuple[str, ...]
    """Captions."""
    matches: tuple[Match, ...]
    """The pairs that each concept fits."""
    captions: dict[str, str] = Field(default_factory=dict, exclude=True)
    """Pair -> one of its captions, for named pairs and near misses whose files are here."""
    answered: str = ""
    """When the request was answered before. Empty if it was not."""
    advice: str = ""
    """Another method that suits it better. Empty if there is none."""
    files: tuple[Path, ...] = ()
    """The list of ids and the sheet of pictures."""

    def line(self) -> str:
        """The preview in one line, printed before the work begins."""
        if self.answered:
            return f"answered already, {self.answered}: {self.meaning}; nothing is computed again"
        outside = self.impact.untrained_words
        if not self.impact.to_forget and outside:
            return f"erasing {outside}, {self.meaning}; no model was trained on them"
        if not self.impact.to_forget:
            return f"{self.meaning} is closed already; it is answered once more, from the model before its release"
        held = ", ".join(f"{self.names[client]} ({count})" for client, count in self.impact.clients.items())
        seen = f"; e.g. “{shortened(self.examples[0])}”" if self.examples else ""
        time = "" if self.impact.seconds is None else f"; about {duration(self.impact.seconds)}"
        also = f" and erasing {outside}" if outside and isinstance(self.request, SampleRequest) else ""
        return (
            f"forgetting {self.impact.to_forget} of {self.impact.remaining} training pairs{also}, {self.meaning}; of "
            f"client {held}{seen}{time}{f'; {self.advice}' if self.advice else ''}"
        )

    def render(self) -> Iterator[RenderableType]:
        yield labelled("would forget", f"{self.meaning}; called {self.id}")
        for match in self.matches:
            yield labelled("matched", match.describe())
            if match.related:
                words = ", ".join(f"{word} ({count})" for word, count in match.related.items())
                yield labelled("not matched", f"longer words, add --concept for those that are meant: {words}")
        rows = [[self.names[client], str(count)] for client, count in self.impact.clients.items()]
        title = f"{self.impact.to_forget} of {self.impact.remaining} training pairs"
        yield table(title, ["client", "pairs to forget"], rows)
        for caption in self.examples:
            yield labelled("for example", f"“{shortened(caption)}”")
        for match in self.matches:
            for each in match.near_misses[:SHOWN]:
                caption = f" “{shortened(self.captions[each])}”" if each in self.captions else ""
                said = f"{each}{caption} ({match.scores[each]:.2f})"
                yield labelled("near miss", said)
        if self.answered:
            yield labelled("answered already", self.answered)
        elif self.impact.seconds is not None:
            yield labelled(
                "would take", f"about {duration(self.impact.seconds)}, {self.impact.cost_fraction:.0%} of retraining"
            )
        if self.advice:
            yield labelled("advice", self.advice)
        yield "Nothing was forgotten."
        if self.files:
            listed, pictures = self.files
            yield labelled("pictures", f"{pictures} (private)")
            yield labelled("ids", f"{listed}; edit the list and use it: ease forget {self.run} --samples {listed}")


def shortened(caption: str) -> str:
    caption = plain(caption)
    return caption if len(caption) <= LONGEST_CAPTION else f"{caption[: LONGEST_CAPTION - 1].rstrip()}…"


def look(run: Run, world: World, resolved: Resolved, method: Unlearner) -> Preview:
    """The preview of a request with this method."""
    request, members = resolved.request, world.server.membership
    ids = tuple(named_ids(members, request))
    places = {pair_id: place for place, pair_id in enumerate(world.evaluator.pairs.ids)}
    near = [each for match in resolved.matches for each in match.near_misses]
    captions = {each: world.evaluator.pairs.captions[places[each]][0] for each in (*ids, *near) if each in places}
    for match in resolved.matches:
        captions |= match.captions
    there = [each for match in resolved.matches for each in match.ids] or list(ids)
    there = [each for each in there if each in captions]  # with pairs on site there is none here
    rng = generator(world.config.seed, "examples")
    chosen = range(min(SHOWN, len(there))) if resolved.matches else sorted(rng.permutation(len(there))[:SHOWN].tolist())
    meaning = in_words(request, members.names)
    if isinstance(request, ClassRequest):
        words = [", ".join(class_words(world, label)) for label in request.classes]
        meaning += f" ({'; '.join(filter(None, words))})" if any(words) else ""
    expected = impact_of(run, request, method)
    return Preview(
        run=run.folder,
        id=request_id(request),
        request=request,
        ids=ids,
        impact=expected,
        names={holding.client: members.named(holding.client) for holding in members.clients},
        examples=tuple(captions[there[place]] for place in chosen),
        matches=resolved.matches,
        meaning=meaning,
        captions=captions,
        answered=when_answered(answer_of(run, request, method)),
        advice=method.advice(expected.to_forget / expected.remaining, expected.cost_fraction),
    )


def when_answered(stored: StoredAnswer) -> str:
    """When a result was finished, by the date of its record. Empty if it is not finished."""
    if not stored.done:
        return ""
    return datetime.fromtimestamp(stored.record_path.stat().st_mtime).strftime("%Y-%m-%d %H:%M")


def print_preview(preview: Preview, quiet: bool) -> None:
    """Print the preview in one line."""
    if not quiet:
        errors.print(plain(preview.line()), soft_wrap=True, markup=False, highlight=False)


def preview_run(folder: Path, wanted: RequestOptions, method: Unlearner | None, quiet: bool) -> Preview:
    """Look at a request on a finished run; write its ids and pictures into the run, and change nothing else."""
    run = Run.load(folder)
    method = method or default_method(run)
    trained_of(run)
    check_method(run, method)
    check_options(run, wanted)
    warn_about_threads(run)
    with status("preparing data and backbone", quiet):
        world = open_world(run)
        resolved = parse_request(world, wanted)
        if resolved.request in world.gone:
            world = open_world(run, resolved.request)
        check_request(world, resolved.request)
        seen = look(run, world, resolved, method)
        return written(world, seen)


def written(world: World, seen: Preview) -> Preview:
    """Write the list of ids and the sheet of pictures, readable only by this user, and return their paths too."""
    folder = seen.run / FOLDER / seen.id
    files = (folder / "ids.txt", folder / "sheet.html")
    write_atomic(files[0], listing(seen).encode())
    write_atomic(files[1], pictures(world, seen).encode())
    return seen.model_copy(update={"files": files})


def listing(seen: Preview) -> str:
    """The ids, one a line, each with a caption; near misses as comments, to be taken in by deleting the `# `."""
    lines = [
        f"# {seen.meaning}: {len(seen.ids)} pairs. Delete lines to keep pairs; what follows a tab and # is a remark."
    ]
    lines += [_line(each, seen) for each in ordered(seen)]
    near = [each for match in seen.matches for each in match.near_misses if each not in set(seen.ids)]
    if near:
        lines.append("# Near misses; delete the `# ` before an id to forget it too.")
        lines += [f"# {_line(each, seen)}" for each in dict.fromkeys(near)]
    return "".join(f"{line}\n" for line in lines)


def _line(pair_id: str, seen: Preview) -> str:
    caption = plain(seen.captions.get(pair_id, ""))
    return f"{pair_id}\t# {caption}" if caption else pair_id


def ordered(seen: Preview) -> list[str]:
    """Pairs that words found first, the nearest first; then the others."""
    found = [each for match in seen.matches for each in match.ids]
    return list(dict.fromkeys((*found, *seen.ids)))


def pictures(world: World, seen: Preview) -> str:
    """The HTML sheet of pairs to forget and of near misses."""
    holder = {each: seen.names[h.client] for h in world.server.membership.clients for each in h.train_ids}
    there = [each for each in ordered(seen) if each in seen.captions]
    shown = [there[place] for place in spread(len(there), MOST_CARDS)]
    note = "" if len(shown) == len(there) else f"{len(shown)} of {len(there)}, evenly chosen."
    rows = [Row(f"To be forgotten: {len(seen.ids)} pairs", cards(world, shown, seen, holder), note)]
    for match in seen.matches:
        rows.append(Row(f"Near misses of “{match.words}”: would stay", cards(world, match.near_misses, seen, holder)))
    return sheet(f"Would forget {seen.meaning}", PRIVATE, [rows])


def spread(count: int, most: int) -> list[int]:
    """At most `most` indices, evenly spread over `count`."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int)).tolist() if count else []


def cards(world: World, ids: Sequence[str], seen: Preview, holder: Mapping[str, str]) -> list[Card]:
    places = {pair_id: place for place, pair_id in enumerate(world.evaluator.pairs.ids)}
    scores = {each: score for match in seen.matches for each, score in match.scores.items()}
    saying = {each for match in seen.matches for each in match.saying}
    made = []
    for each in (each for each in ids if each in places):
        near = [f"cosine {scores[each]:.2f}{'' if each in saying else ', not in a caption'}"] if each in scores else []
        notes = (each, f"client {holder[each]}", *near)
        made.append(Card(data_address(world.evaluator.pairs.pixels[places[each]]), seen.captions[each], notes))
    return made
