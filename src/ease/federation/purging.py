"""Purging at the sites: nodes delete what they store of closed pairs and keep salted marks of them.

A mark is a salted hash of an id. With it a node recognises a closed pair that is submitted again, without storing its
id."""

from collections.abc import Collection, Mapping, Sequence

from ease.errors import UserError
from ease.federation.check import each_reason
from ease.federation.remote import Remote, collected
from ease.federation.wire import PurgeReply, PurgeRequest, decode_purge_reply


def purge_nodes(
    remote: Remote,
    salt: str,
    marks: Mapping[int, Sequence[str]],
    leaving: Collection[int],
    dry_run: bool = False,
    lost: Collection[int] = (),
) -> dict[int, PurgeReply]:
    """Client -> what its node deleted and what it still stores; all clients of `marks` must answer, except `lost` ones.

    With `dry_run` nodes delete nothing, and clients that are missing or refuse are named.
    """
    requests = {
        client: PurgeRequest(salt=salt, marks=tuple(sorted(own)), leaves=client in leaving, dry_run=dry_run)
        for client, own in marks.items()
    }
    asks = {client: remote.ask("purge", client, len(marks), purge=purge) for client, purge in requests.items()}
    found, reasons = collected(remote, asks, {}, lambda data: (decode_purge_reply(data), {}))
    reasons = {client: why for client, why in reasons.items() if client not in lost}
    if reasons:
        before = "nothing was purged" if dry_run else "the purge has begun and nothing else is done before it ends"
        raise UserError(
            f"some nodes have not dropped what they keep ({each_reason(reasons)}); {before}: run it again once they "
            "do, or record with --lost-site and --reason that a site is gone for good"
        )
    return {client: reply for client, (reply, _) in found.items()}
