"""DSSE envelopes: bytes of a named type with the signatures of one or more keys over both.

Written by hand on `cryptography`, because an envelope is read by the same checked model as every other record, and
securesystemslib would bring a second format of keys.
"""

import base64
import binascii
from typing import Any

from pydantic import Field

from ease.config import Config
from ease.errors import UserError
from ease.operations.evidence.canonical import Refuted, canonical, parse_as
from ease.operations.evidence.keys import PublicKey, SigningKey

KEY_BYTES, SIGNATURE_BYTES = 32, 64
MOST_SIGNATURES = 64


class Signature(Config):
    """One key's signature. The key itself travels along, and its hash must be the key's id."""

    keyid: str
    public: str
    """The 32 bytes of the public key, in base64."""
    sig: str

    @property
    def key(self) -> PublicKey:
        return PublicKey(decoded(self.public, "the public key of a signature"))


class Envelope(Config):
    """A payload with its type, and who signed it."""

    payload: str
    """In base64."""
    payloadType: str
    signatures: tuple[Signature, ...] = Field(min_length=1, max_length=MOST_SIGNATURES)

    @property
    def content(self) -> bytes:
        return decoded(self.payload, "the payload")

    def file_bytes(self) -> bytes:
        return canonical(self.model_dump(mode="json"))


def encoded(content: bytes) -> str:
    return base64.b64encode(content).decode()


def decoded(text: str, what: str) -> bytes:
    """The bytes of base64 in its one spelling: loose readers ignore the last bits of some letters."""
    try:
        content = base64.b64decode(text.encode(), validate=True)
    except (ValueError, binascii.Error) as error:
        raise Refuted(f"{what} is not base64") from error
    if encoded(content) != text:
        raise Refuted(f"{what} is not base64 as it is written")
    return content


def signed_bytes(kind: str, content: bytes) -> bytes:
    """What DSSE signs (its pre-authentication encoding): type and content, each behind its length."""
    name = kind.encode()
    return b"DSSEv1 %d %b %d %b" % (len(name), name, len(content), content)


def sealed(kind: str, value: Any, key: SigningKey) -> Envelope:
    """A value in canonical JSON, signed."""
    content = canonical(value)
    return Envelope(payload=encoded(content), payloadType=kind, signatures=(_signature(kind, content, key),))


def countersigned(envelope: Envelope, key: SigningKey) -> Envelope:
    """The same with one more signature; a key signs once."""
    if key.public.id in {each.keyid for each in envelope.signatures}:
        raise UserError(f"this key has signed already ({key.public.id}); each key signs once")
    added = _signature(envelope.payloadType, envelope.content, key)
    return Envelope(
        payload=envelope.payload, payloadType=envelope.payloadType, signatures=(*envelope.signatures, added)
    )


def _signature(kind: str, content: bytes, key: SigningKey) -> Signature:
    signature = key.sign(signed_bytes(kind, content))
    return Signature(keyid=key.public.id, public=encoded(key.public.raw), sig=encoded(signature))


def open_envelope(content: bytes, kind: str, source: str) -> Envelope:
    """An envelope of one type whose every signature holds; who the keys belong to is for the caller to know."""
    envelope = parse_as(Envelope, content, source)
    if envelope.payloadType != kind:
        raise Refuted(f"{source}: holds {envelope.payloadType[:100]!r}, not {kind!r}")
    message = signed_bytes(kind, envelope.content)
    for number, each in enumerate(envelope.signatures, 1):
        if each.key.id != each.keyid:
            raise Refuted(f"{source}: signature {number}: its key is not the one that its key id names")
        signature = decoded(each.sig, f"signature {number}")
        if len(each.key.raw) != KEY_BYTES or len(signature) != SIGNATURE_BYTES:
            raise Refuted(f"{source}: signature {number}: not of the length that Ed25519 has")
        if not each.key.signed(message, signature):
            raise Refuted(f"{source}: signature {number} does not hold: the content or the signature was changed")
    if len({each.keyid for each in envelope.signatures}) < len(envelope.signatures):
        raise Refuted(f"{source}: one key has signed twice")
    return envelope
