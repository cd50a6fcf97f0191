"""Requests from the names, words and ids that people give, or a refusal that says why."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ease.data.membership import Membership
from ease.errors import UserError, did_you_mean
from ease.requests.request import ClassRequest, ClientRequest, Request, SampleRequest, every_id, named_in
from ease.runs.concepts import Match, check_phrases, check_words, match_concept
from ease.runs.run import Run
from ease.runs.world import World
from ease.storage import digest, read_bytes

LARGEST_LIST = 1 << 28
"""Bytes of the largest list of ids that is read."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,59}")
TAKEN = re.compile(r"(client|class)-[0-9]|sample-[0-9a-f]{10}|concept-[0-9a-f]{6}")
COMMENT = re.compile(r"\t#.*|^# .*|^#$")
"""In a list of ids: behind a tab, or a whole line. An id may begin with # all the same."""


def request_id(request: Request) -> str:
    """The stable name of a request. It contains no words, because they may be a person's name."""
    if isinstance(request, ClientRequest):
        return "client-" + "-".join(map(str, request.clients))
    if isinstance(request, ClassRequest):
        return "class-" + "-".join(map(str, request.classes))
    if request.name:
        return request.name
    parts = [f"client-{number}" for number in request.clients] + [f"class-{number}" for number in request.classes]
    parts += ["concept"] if request.words else []
    if not parts:
        return "sample-" + digest(sorted(request.ids))[:10]
    return f"{'-'.join(parts)[:40].strip('-')}-{digest(sorted(request.ids))[:6]}"


def request_flags(request: Request) -> str:
    """The request as options of `ease forget`; a list of ids appears as `ids.txt`."""
    if isinstance(request, ClientRequest):
        return " ".join(f"--client {number}" for number in request.clients)
    if isinstance(request, ClassRequest):
        return " ".join(f"--class {number}" for number in request.classes)
    flags = [f"--client {number}" for number in request.clients] + [f"--class {number}" for number in request.classes]
    flags += [f"--concept {shlex.quote(words)}" for words in request.words]
    flags += [f"--except {shlex.quote(phrase)}" for phrase in request.unless]
    flags += [] if request.threshold is None else [f"--threshold {request.threshold:g}"]
    flags += ["--samples ids.txt"] if request.singles or not flags else []
    return " ".join([*flags, *([f"--name {request.name}"] if request.name else [])])


def named_ids(membership: Membership, request: Request) -> list[str]:
    """Ids of the training pairs that a request names, at all clients."""
    return named_in(request, membership.clients)


def check_request(world: World, request: Request) -> None:
    """Refuse a request that names nothing, unknown things, only forgotten pairs, or all pairs."""
    members = world.server.membership
    _check_known(members, len(world.server.centroids), request)
    if isinstance(request, SampleRequest):
        known = {pair_id for holding in members.clients for pair_id in holding.train_ids}
        unknown = sorted(set(request.ids) - known.union(*members.untrained().values()))
        if unknown:
            raise UserError(
                f"--samples: {len(unknown)} of {len(request.ids)} ids are not pairs of this run, e.g. {unknown[0]!r}"
            )
    gone = {pair_id for closed in world.gone for pair_id in named_ids(members, closed)}
    named = set(named_ids(members, request))
    outside = every_id(request, members) - named
    left = sum(len(holding.train_ids) for holding in members.clients) - len(gone)
    if not named and not outside:
        raise UserError("the request matches no pair of this run: there is nothing to forget")
    if named <= gone and outside <= {each for closed in world.gone for each in every_id(closed, members)}:
        raise UserError("everything that the request names is gone already: this run has forgotten it before")
    if named - gone and len(named - gone) == left:
        raise UserError("the request names all training data: nothing would be retained; delete the run instead")


def _check_known(members: Membership, classes: int, request: Request) -> None:
    """Refuse clients and classes that this run does not have."""
    if isinstance(request, ClientRequest):
        unknown = sorted(set(request.clients).difference(holding.client for holding in members.clients))
        if unknown:
            raise UserError(f"--client {unknown[0]}: no such client; this run has {_those(members)}")
    if isinstance(request, ClassRequest):
        unknown = sorted(set(request.classes) - set(range(classes)))
        if unknown:
            raise UserError(f"--class {unknown[0]}: no such pseudo-class; this run has 0 to {classes - 1}")


def _those(members: Membership) -> str:
    """The names of a run's clients, for a message."""
    names = [members.named(holding.client) for holding in members.clients]
    if all(holding.name is None for holding in members.clients):
        return f"clients {names[0]} to {names[-1]}"
    return ", ".join(names)


def find_clients(members: Membership, named: Sequence[str | int], option: str = "--client") -> tuple[int, ...]:
    """Clients by site names or numbers, each once, with the clients that hold its later pairs."""
    by_name = {holding.name: holding.client for holding in members.clients if holding.name is not None}
    found = set[int]()
    for name in named:
        if name in by_name:
            found.add(by_name[str(name)])
        elif isinstance(name, int) or _is_number(name):
            found.add(int(name))
        else:
            raise UserError(
                f"{option} {name}: no such client{did_you_mean(name, by_name)}; this run has {_those(members)}"
            )
    return tuple(sorted(members.owned(found)))


def _is_number(text: str) -> bool:
    """Whether a text is a number of at most 18 digits."""
    return text.isdecimal() and len(text) < 19


@dataclass(frozen=True)
class RequestOptions:
    """The options that describe a request; several kinds can be combined."""

    clients: Sequence[str | int] = ()
    classes: Sequence[str] = ()
    """Numbers of pseudo-classes; words are taken for concepts."""
    concepts: Sequence[str] = ()
    samples: Path | Sequence[str] | None = None
    """A file of ids, or the ids."""
    canaries: bool = False
    name: str = ""
    threshold: float | None = None
    unless: Sequence[str] = ()
    """Phrases in which the words of concepts do not count."""

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of pseudo-classes."""
        return tuple(sorted({int(text) for text in self.classes if _is_number(text)}))

    @property
    def words(self) -> tuple[str, ...]:
        """All concepts."""
        return (*self.concepts, *(text for text in self.classes if not _is_number(text)))

    @property
    def kinds(self) -> list[bool]:
        """Which kinds of things it names."""
        return [bool(each) for each in (self.clients, self.numbers, self.words, self.samples, self.canaries)]


@dataclass(frozen=True)
class Resolved:
    """The request, and the matches of its words."""

    request: Request
    matches: tuple[Match, ...] = ()


def check_options(run: Run, wanted: RequestOptions) -> None:
    """Refuse impossible requests before the data are opened, which may take minutes."""
    known = run.known()
    if known is not None:
        _whole(known[0], len(known[1]), wanted)
        if isinstance(wanted.samples, Path):
            read_ids(wanted.samples)


def _whole(members: Membership, classes: int, wanted: RequestOptions) -> tuple[ClientRequest | ClassRequest, ...]:
    """The requests for whole clients and classes; contradictory options are refused."""
    if not any(wanted.kinds):
        raise UserError("name what to forget with --client, --concept, --class, --samples or --canaries, or several")
    if wanted.threshold is not None and not wanted.words:
        raise UserError("--threshold says how near pairs must be to the words of --concept: give some")
    if wanted.unless and not wanted.words:
        raise UserError("--except names phrases in which the words of --concept do not count: give a concept too")
    for words in wanted.words:
        check_words(words)
        check_phrases(words, wanted.unless)
    if wanted.canaries and sum(wanted.kinds) > 1:
        raise UserError("--canaries is a separate request: canaries are not data, and are measured by themselves")
    if wanted.name:
        check_name(wanted.name)
    clients = find_clients(members, wanted.clients)
    found: list[ClientRequest | ClassRequest] = [ClientRequest(clients=clients)] if clients else []
    if wanted.numbers:
        found.append(ClassRequest(classes=wanted.numbers, text=", ".join(wanted.classes)))
    for each in found:
        _check_known(members, classes, each)
    return tuple(found)


def parse_request(world: World, wanted: RequestOptions) -> Resolved:
    """The request for names, words and ids. Several kinds of things become a list of all their pairs."""
    whole = _whole(world.server.membership, len(world.server.centroids), wanted)
    if sum(wanted.kinds) == 1 and whole:
        if wanted.name:
            raise UserError(
                f"--name {wanted.name}: this request is called {request_id(whole[0])} already; leave it out"
            )
        return Resolved(whole[0])
    listed = read_ids(wanted.samples) if isinstance(wanted.samples, Path) else set(wanted.samples or ())
    listed |= set(planted_ids(world)) if wanted.canaries else set()
    matches = tuple(
        match_concept(world, words, wanted.threshold, wanted.unless) for words in dict.fromkeys(wanted.words)
    )
    ids = listed | {pair_id for match in matches for pair_id in match.ids}
    ids |= {pair_id for each in whole for pair_id in named_ids(world.server.membership, each)}
    request = SampleRequest(
        ids=tuple(sorted(ids)),
        name=wanted.name,
        words=tuple(match.words for match in matches),
        threshold=wanted.threshold,
        unless=tuple(wanted.unless),
        clients=tuple(client for each in whole if isinstance(each, ClientRequest) for client in each.clients),
        classes=wanted.numbers,
        singles=len(listed) if matches or whole else 0,
    )
    return Resolved(request, matches)


def check_name(name: str) -> None:
    """Refuse a request name that looks like a generated one or that no folder can have."""
    if not NAME.fullmatch(name):
        raise UserError(f"--name {name!r}: use up to 60 letters, digits, hyphens and dots, the first a letter or digit")
    if TAKEN.match(name):
        raise UserError(f"--name {name}: such names are those of clients, classes and unnamed lists; choose another")


def planted_ids(world: World) -> list[str]:
    """Ids of all canaries that some client trained on."""
    canaries = {world.evaluator.pairs.ids[position] for position in world.evaluator.canaries}
    found = [each for holding in world.server.membership.clients for each in holding.train_ids if each in canaries]
    if not found:
        raise UserError("--canaries: none was planted in this run; train one with --set data.canaries=200")
    return found


def read_ids(path: Path, option: str = "--samples") -> set[str]:
    """The ids in a file with one id per line."""
    try:
        lines = read_bytes(path, LARGEST_LIST).decode().splitlines()
        ids = {COMMENT.sub("", line).strip() for line in lines} - {""}
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{option} {path}: cannot be read as a list of ids, one a line ({error})") from error
    if not ids:
        raise UserError(f"{option} {path}: holds no id; write one id a line")
    return ids
