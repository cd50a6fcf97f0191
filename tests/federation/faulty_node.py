"""`ease node` with a will of its own, for tests: files in a folder make it wait in the middle of a job, or lie.

python tests/federation/faulty_node.py FOLDER node --id 0 ...
"""

import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import ease.federation.node
from ease.cli import main
from ease.federation.codec import decode_update, encode_update
from ease.federation.node import Node
from ease.federation.protocol import Update
from ease.federation.wire import UPDATE, Ask, decode_answer, encode

HUGE = 1e6


def with_update(change: Callable[[Update], Update]) -> Callable[[bytes], bytes]:
    def changed(data: bytes) -> bytes:
        answer, update = decode_answer(data)
        assert update is not None
        return encode(answer, {UPDATE: encode_update(change(decode_update(update)))})

    return changed


LIES: dict[str, Callable[[bytes], bytes]] = {
    "garbled": lambda data: data[: len(data) // 2] + bytes(len(data) - len(data) // 2),
    "not numbers": with_update(lambda u: replace(u, delta=u.change.map(lambda tensor: tensor * float("nan")))),
    "another shape": with_update(lambda u: replace(u, delta=u.change.map(lambda tensor: tensor.reshape(-1)))),
    "huge": with_update(lambda u: replace(u, delta=u.change.map(lambda tensor: tensor * HUGE))),
    "foreign id": with_update(lambda u: replace(u, client=0)),
}


def disobeying(folder: Path) -> Callable[..., bytes]:
    """A `respond` that looks into the folder first."""
    honest, said = Node.respond, dict[int, list[bytes]]()

    def respond(self: Node, ask: Ask, job: bytes, parts: dict[str, bytes]) -> bytes:
        if ask.kind != "task":
            return honest(self, ask, job, parts)
        client, pause = self.shard.client, folder / f"pause-{self.shard.client}"
        if pause.exists() and pause.read_bytes() in job:
            (folder / f"paused-{client}").touch()
            while pause.exists():
                time.sleep(0.05)
        answer = honest(self, ask, job, parts)
        before = said.setdefault(client, [])
        before.append(answer)
        reported = folder / f"lies-{client}.json"
        found = re.search(rb'"round":(\d+)', job)
        lie = json.loads(reported.read_text()).get(found.group(1).decode()) if reported.exists() and found else None
        return answer if lie is None else before[-2] if lie == "yesterday's" else LIES[lie](answer)

    return respond


if __name__ == "__main__":
    ease.federation.node.Node.respond = disobeying(Path(sys.argv.pop(1)))  # type: ignore[method-assign]
    main()
