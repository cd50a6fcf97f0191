"""The chain of steps: each holds the hash of the step before it, and may be signed with the key of a person.

What people wrote is in the chain by a salted hash only. Words can therefore be redacted later, together with their
salt, and the chain still holds.
"""

import hmac
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from ease.errors import UserError
from ease.operations.evidence.canonical import Refuted, canonical, hashed
from ease.operations.evidence.envelope import decoded, encoded, signed_bytes
from ease.operations.evidence.keys import PublicKey, SigningKey
from ease.operations.ledger.records import Entry, Event, StepSignature
from ease.operations.ledger.states import OPEN, State

KIND = "application/vnd.ease.ledger-step+json"
NOTHING = "0" * 64
"""The first step's value instead of a hash."""
SALT_BYTES = 16
FIRST_OF_SEVERAL = "approval"
"""How the words of an approval begin that leaves the state, because the policy asks for more people."""


def content_of(salt: str, why: str, entry: Entry | None) -> str:
    """Return the salted hash of the words of a step and, of the first one, of what was handed in."""
    about = None
    if entry is not None:
        named = {"id", "request", "method", "asked_by", "ground", "submitted"}
        about = json.dumps(entry.model_dump(mode="json", include=named), sort_keys=True)
    return hmac.digest(bytes.fromhex(salt), canonical([why, about]), "sha256").hex()


def new_step(
    last: Event | None,
    entry: Entry,
    time: str,
    before: State | None,
    by: str,
    why: str,
    deadline: str = "",
    key: SigningKey | None = None,
) -> Event:
    """Return a step that follows the `last` one, signed if there is a key."""
    salt = secrets.token_hex(SALT_BYTES)
    step = Event(
        request=entry.id,
        time=time,
        before=before,
        after=entry.state,
        by=by,
        why=why,
        deadline=deadline,
        salt=salt,
        content=content_of(salt, why, entry if before is None else None),
        previous=NOTHING if last is None else link(last),
    )
    if key is None:
        return step
    signature = key.sign(signed_bytes(KIND, canonical(_statement(step))))
    return step.model_copy(
        update={"signature": StepSignature(key=encoded(key.public.raw), signature=encoded(signature))}
    )


def redacted(step: Event) -> Event:
    """Return a step without the words in it; its hash stays the same."""
    return step.model_copy(update={"why": "", "salt": "", **({"by": ""} if step.before is None else {})})


def link(step: Event) -> str:
    """Return the hash that the following step holds."""
    return hashed(_statement(step) | {"signature": step.signature and step.signature.model_dump()})


def signer(step: Event) -> PublicKey | None:
    """Return whose signature a step bears, or refuse one that does not hold; None: it is not signed."""
    if step.signature is None:
        return None
    key = PublicKey(decoded(step.signature.key, "the public key of a step"))
    message = signed_bytes(KIND, canonical(_statement(step)))
    if not key.signed(message, decoded(step.signature.signature, "the signature of a step")):
        raise Refuted("its signature does not hold")
    return key


def check_chain(steps: Sequence[Event], entries: Mapping[str, Entry], where: str) -> str:
    """Refuse steps that were altered, left out or put in; return the hash of the last one."""
    previous, states = NOTHING, dict[str, State]()
    for number, step in enumerate(steps, start=1):
        place = f"{where}: step {number} ({step.request})"
        if step.previous != previous:
            raise Refuted(f"{place}: does not follow the step before it; steps were altered, left out or put in")
        previous = link(step)
        try:
            signer(step)
        except UserError as error:
            raise Refuted(f"{place}: {error}") from error
        if step.before != states.get(step.request) or step.before not in {None, *OPEN, step.after}:
            raise Refuted(f"{place}: from {step.before}, and the request was {states.get(step.request)}")
        states[step.request] = step.after
        if step.salt and not _has_content(step, entries.get(step.request)):
            raise Refuted(f"{place}: its words, or what was handed in, are not those that it was stored with")
    for id, entry in entries.items():
        if states.get(id) != entry.state:
            raise Refuted(f"{where}: {id} is {entry.state}, and its last step says {states.get(id)}")
    return previous


def _has_content(step: Event, entry: Entry | None) -> bool:
    return hmac.compare_digest(step.content, content_of(step.salt, step.why, entry if step.before is None else None))


def _statement(step: Event) -> dict[str, Any]:
    """The signed and chained content: everything except the words and the name of the person who asked."""
    private = {"why", "salt", "signature", *(["by"] if step.before is None else [])}
    return step.model_dump(mode="json", exclude=private)
