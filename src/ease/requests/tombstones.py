"""What was forgotten for good, by salted hashes: enough to know it when it comes back, and no more."""

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from ease.config import Config, validate
from ease.data.membership import Holding, Membership
from ease.requests.request import Request, SampleRequest
from ease.storage import read_json

NAME = "tombstones.json"
PREFIX = "gone-"


class Tombstones(Config):
    """Hashes of ids and contents of purged pairs. The salt is the run's own: no two runs can be joined by them."""

    format: Literal[1] = 1
    salt: str
    ids: frozenset[str] = frozenset()
    contents: frozenset[str] = frozenset()

    def mark(self, text: str) -> str:
        """What stands for an id or a content once it is purged."""
        return PREFIX + hmac.new(bytes.fromhex(self.salt), text.encode(), hashlib.sha256).hexdigest()[:24]

    def bars(self, pair_id: str, content: str = "") -> bool:
        """Whether a pair was purged, by its id or by what it holds."""
        return self.mark(pair_id) in self.ids or (bool(content) and self.mark(content) in self.contents)

    def renamed(self, request: Request) -> Request:
        """The same request, purged ids by their marks."""
        if not isinstance(request, SampleRequest):
            return request
        return request.model_copy(update={"ids": tuple(sorted(self.marked(request.ids)))})

    def marked(self, ids: Iterable[str]) -> tuple[str, ...]:
        """The same ids, purged ones by their marks."""
        return tuple(map(self._mark_of, ids))

    def _mark_of(self, pair_id: str) -> str:
        return self.mark(pair_id) if self.mark(pair_id) in self.ids else pair_id

    def over(self, membership: Membership, ids: Iterable[str]) -> "Tombstones":
        """With more pairs, by their ids and by what the membership says they hold."""
        named = set(ids) - self.ids  # what is a mark already stays one
        marks = self.ids | {self.mark(each) for each in named}
        contents = self.contents | {self.mark(membership.digests[each]) for each in named & membership.digests.keys()}
        return self.model_copy(update={"ids": frozenset(marks), "contents": frozenset(contents)})

    def without(self, ids: Iterable[str], contents: Iterable[str]) -> "Tombstones":
        """With some pairs allowed again."""
        marks, held = {self.mark(each) for each in ids}, {self.mark(each) for each in contents}
        return self.model_copy(update={"ids": self.ids - marks, "contents": self.contents - held})

    def buried(self, membership: Membership) -> Membership:
        """Who holds what, purged pairs by their marks: places and classes stay, for replays draw batches by them."""

        def marked(holding: Holding) -> Holding:
            changes = {name: self.marked(getattr(holding, name)) for name in ("train_ids", "validation_ids")}
            return holding.model_copy(update=changes)

        kept = {pair_id: told for pair_id, told in membership.digests.items() if self.mark(pair_id) not in self.ids}
        return membership.model_copy(update={"clients": tuple(map(marked, membership.clients)), "digests": kept})


def read_tombstones(folder: Path) -> Tombstones:
    """Those of a run; of one that purged nothing, none, with a new salt."""
    path = folder / NAME
    return validate(Tombstones, read_json(path), str(path)) if path.is_file() else Tombstones(salt=new_salt())


def new_salt() -> str:
    return secrets.token_hex(16)


def as_json(tombstones: Tombstones) -> dict[str, object]:
    return {**tombstones.model_dump(), "ids": sorted(tombstones.ids), "contents": sorted(tombstones.contents)}
