"""Purging at the clients' own sites: every node is told by marks what it is to keep nothing else of.

A mark is a salted hash of an id. With it a node still knows a closed pair when it comes back, and no longer what it
was called.
"""

from collections.abc import Collection, Mapping, Sequence

from ease.errors import UserError
from ease.federation.check import each_reason
from ease.federation.remote import Remote, collected
from ease.federation.wire import Burial, Dropped, decode_dropped


def bury(
    remote: Remote,
    salt: str,
    marks: Mapping[int, Sequence[str]],
    leaving: Collection[int],
    only_asked: bool = False,
    lost: Collection[int] = (),
) -> dict[int, Dropped]:
    """Client -> what its node dropped and what it still keeps; all of `marks` must answer, except `lost` ones.

    With `only_asked` nothing happens yet: whoever is missing or will not do it is named while all can go on as it was.
    """
    burials = {
        client: Burial(salt=salt, marks=tuple(sorted(own)), leaves=client in leaving, only_asked=only_asked)
        for client, own in marks.items()
    }
    asks = {client: remote.ask("purge", client, len(marks), burial=burial) for client, burial in burials.items()}
    found, reasons = collected(remote, asks, {}, lambda data: (decode_dropped(data), {}))
    reasons = {client: why for client, why in reasons.items() if client not in lost}
    if reasons:
        before = "nothing was purged" if only_asked else "the purge has begun and nothing else is done before it ends"
        raise UserError(
            f"some nodes have not dropped what they keep ({each_reason(reasons)}); {before}: run it again once they "
            "do, or record with --lost-site and --reason that a site is gone for good"
        )
    return {client: told for client, (told, _) in found.items()}
