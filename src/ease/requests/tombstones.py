"""Tombstones: salted hashes of purged pairs, by which they are recognised if they return."""

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from ease.config import Config, validate
from ease.data.membership import Holding, Membership
from ease.requests.request import Request, SampleRequest
from ease.storage import read_json

NAME = "tombstones.json"
PREFIX = "gone-"


class Tombstones(Config):
    """Hashes of ids and contents of purged pairs. Each run has its own salt, so that runs cannot be linked."""

    format: Literal[1] = 1
    salt: str
    ids: frozenset[str] = frozenset()
    contents: frozenset[str] = frozenset()
    words: frozenset[str] = frozenset()
    """Marks of the words that purged requests searched for, which may be a person's name."""

    def mark(self, text: str) -> str:
        """The mark that replaces a purged id or content."""
        return PREFIX + hmac.new(bytes.fromhex(self.salt), text.encode(), hashlib.sha256).hexdigest()[:24]

    def bars(self, pair_id: str, content: str = "") -> bool:
        """Whether a pair was purged, by its id or its content."""
        return self.mark(pair_id) in self.ids or (bool(content) and self.mark(content) in self.contents)

    def renamed(self, request: Request) -> Request:
        """The request with purged ids and words replaced by their marks."""
        if not isinstance(request, SampleRequest):
            return request

        def said(words: Iterable[str]) -> tuple[str, ...]:
            return tuple(self.mark(each) if self.mark(each) in self.words else each for each in words)

        ids = tuple(sorted(self.marked(request.ids)))
        return request.model_copy(update={"ids": ids, "words": said(request.words), "unless": said(request.unless)})

    def without_names(self, value: Any) -> Any:
        """The JSON value with purged ids and words replaced by their marks."""
        if isinstance(value, dict):
            return {self.without_names(key): self.without_names(each) for key, each in value.items()}
        if isinstance(value, list):
            return [self.without_names(each) for each in value]
        if isinstance(value, str) and (marked := self.mark(value)) in self.ids | self.words:
            return marked
        return value

    def marked(self, ids: Iterable[str]) -> tuple[str, ...]:
        """The ids with purged ones replaced by their marks."""
        return tuple(map(self._mark_of, ids))

    def _mark_of(self, pair_id: str) -> str:
        return self.mark(pair_id) if self.mark(pair_id) in self.ids else pair_id

    def over(self, membership: Membership, ids: Iterable[str], words: Iterable[str] = ()) -> "Tombstones":
        """The tombstones with further pairs and words."""
        named = set(ids) - self.ids  # what is a mark already stays one
        marks = self.ids | {self.mark(each) for each in named}
        contents = self.contents | {self.mark(membership.digests[each]) for each in named & membership.digests.keys()}
        said = self.words | {self.mark(each) for each in set(words) - self.words}
        return self.model_copy(update={"ids": frozenset(marks), "contents": frozenset(contents), "words": said})

    def without(self, ids: Iterable[str], contents: Iterable[str]) -> "Tombstones":
        """The tombstones without some pairs, which are allowed again."""
        marks, held = {self.mark(each) for each in ids}, {self.mark(each) for each in contents}
        return self.model_copy(update={"ids": self.ids - marks, "contents": self.contents - held})

    def buried(self, membership: Membership) -> Membership:
        """The membership with purged pairs as marks. Places and classes stay, because replays draw batches by them."""

        def marked(holding: Holding) -> Holding:
            changes = {name: self.marked(getattr(holding, name)) for name in ("train_ids", "validation_ids")}
            return holding.model_copy(update=changes)

        kept = {pair_id: digest for pair_id, digest in membership.digests.items() if self.mark(pair_id) not in self.ids}
        splits = {name: self.marked(getattr(membership, name)) for name in ("test", "validation")}
        clients = tuple(map(marked, membership.clients))
        return membership.model_copy(update={"clients": clients, "digests": kept, **splits})


def read_tombstones(folder: Path) -> Tombstones:
    """The tombstones of a run; empty with a new salt if nothing was purged."""
    path = folder / NAME
    return validate(Tombstones, read_json(path), str(path)) if path.is_file() else Tombstones(salt=new_salt())


def new_salt() -> str:
    return secrets.token_hex(16)


def as_json(tombstones: Tombstones) -> dict[str, object]:
    return {
        "format": tombstones.format,
        "salt": tombstones.salt,
        **{name: sorted(getattr(tombstones, name)) for name in ("ids", "contents", "words")},
    }
