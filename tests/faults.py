"""Faults that tests inject: flipped bits, truncated files, and a server that is killed after some answers."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from ease.federation.protocol import Federation, LocalJob, Middleware, Update
from ease.params import Params


def flip(path: Path, place: int = -1, bit: int = 0) -> bytes:
    """Flip one bit of a file and return the content that it had, to restore it."""
    whole = path.read_bytes()
    altered = bytearray(whole)
    altered[place] ^= 1 << bit
    path.write_bytes(altered)
    return whole


def damage(path: Path, kind: str) -> None:
    """Damage a file: `flipped` flips a bit, `truncated` cuts its end off, `missing` deletes it."""
    if kind == "flipped":
        flip(path)
    elif kind == "truncated":
        path.write_bytes(path.read_bytes()[:-5])
    elif kind == "missing":
        path.unlink()
    else:
        raise ValueError(f"unknown damage: {kind}")


class Unplugged(Middleware):
    """A federation whose server is killed after a number of answers."""

    def __init__(self, inner: Federation, answers: int) -> None:
        super().__init__(inner)
        self.left = answers

    def run(self, params: Params, job: LocalJob, clients: Sequence[int]) -> Iterator[Update]:
        for client in clients:
            if self.left == 0:
                raise KeyboardInterrupt
            self.left -= 1
            yield from self.inner.run(params, job, [client])
