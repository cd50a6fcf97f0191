"""Canonical JSON, keys and envelopes against published vectors and encodings written out by hand."""

import base64
import hashlib
import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from ease.errors import UserError
from ease.operations.evidence.canonical import Refuted, canonical, hashed, parse
from ease.operations.evidence.envelope import (
    Envelope,
    countersigned,
    decoded,
    encoded,
    open_envelope,
    sealed,
    signed_bytes,
)
from ease.operations.evidence.keys import (
    LARGEST_KEY,
    PublicKey,
    SigningKey,
    new_key,
    public_path,
    read_public_key,
    read_signing_key,
)

KIND = "application/vnd.ease.test+json"

# The first two test vectors of RFC 8032, section 7.1: secret, public, message, signature.
VECTORS = [
    (
        "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe2"
        "4655141438e7a100b",
    ),
    (
        "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aee"
        "b00d291612bb0c00",
    ),
]


@pytest.fixture
def key() -> SigningKey:
    return SigningKey(Ed25519PrivateKey.from_private_bytes(bytes(range(32))))


@pytest.fixture
def other() -> SigningKey:
    return SigningKey(Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33))))


# --- canonical JSON ---


def test_the_example_of_the_standard_has_its_bytes() -> None:
    """The sample of RFC 8785, section 3.2.2, with the bytes of section 3.2.4."""
    value = {
        "numbers": [333333333.33333329, 1e30, 4.50, 2e-3, 0.000000000000000000000000001],
        "string": '\u20ac$\u000f\nA\'B"\\\\"/',
        "literals": [None, True, False],
    }
    expected = (
        '{"literals":[null,true,false],"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27],'
        '"string":"€$\\u000f\\nA\'B\\"\\\\\\\\\\"/"}'
    )
    assert canonical(value) == expected.encode()
    assert hashed(value) == hashlib.sha256(expected.encode()).hexdigest()


@pytest.mark.parametrize("value", [3.2e16, 1e20, 2.0**53, -1.5e18, 1e21, 1e300, 5e-324, 0.1, -7, 2**53 - 1])
def test_numbers_return(value: float) -> None:
    """Large floats, such as counts of operations, are spelt without a point."""
    assert parse(canonical([value]), "it") == [value]


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), 2**60, {1: 2}, {"a": object()}, "\ud800"], ids=lambda value: repr(value)[:12]
)
def test_values_outside_json_are_refused(value: object) -> None:
    with pytest.raises(UserError, match="cannot be evidence"):
        canonical({"a": value} if not isinstance(value, dict) else value)


@pytest.mark.parametrize(
    "content",
    [
        b'{"a": 1}',
        b'{"b":1,"a":2}',
        b'{"a":1,"a":1}',
        b'{"a":1.0}',
        b'{"a":NaN}',
        b'{"a":1e999}',
        b"{",
        b"\xff",
        b"9" * 5000,
        b"[" * 100_000,
    ],
    ids=lambda content: repr(content[:12]),
)
def test_another_spelling_is_refused(content: bytes) -> None:
    with pytest.raises(Refuted, match="damaged"):
        parse(content, "file")


# --- keys ---


@pytest.mark.parametrize(("secret", "public", "message", "signature"), VECTORS)
def test_published_signatures(secret: str, public: str, message: str, signature: str) -> None:
    key = SigningKey(Ed25519PrivateKey.from_private_bytes(bytes.fromhex(secret)))
    assert key.public.raw.hex() == public
    assert key.public.id == hashlib.sha256(bytes.fromhex(public)).hexdigest()
    assert key.sign(bytes.fromhex(message)).hex() == signature
    assert PublicKey(bytes.fromhex(public)).signed(bytes.fromhex(message), bytes.fromhex(signature))
    assert not PublicKey(bytes.fromhex(public)).signed(b"other", bytes.fromhex(signature))


def test_keys_are_files_for_their_owner(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "client.key"
    made = new_key(path)
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    assert b"PRIVATE KEY" in path.read_bytes() and b"PRIVATE" not in public_path(path).read_bytes()
    assert public_path(path).name == "client.key.pub"
    assert read_signing_key(path).public == made.public == read_public_key(public_path(path))
    secret = path.read_bytes().splitlines()[1].decode()
    assert secret not in repr(made)
    for again in (path, path.with_name("client.key.pub")):
        with pytest.raises(UserError, match=r"client\.key\.pub|never written over"):
            new_key(again if again == path else path)


def test_invalid_keys_are_refused_by_name(tmp_path: Path) -> None:
    new_key(tmp_path / "good")
    stranger = X25519PrivateKey.generate()
    (tmp_path / "x").write_bytes(stranger.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public = stranger.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "x.pub").write_bytes(public)
    (tmp_path / "junk").write_bytes(b"junk")
    (tmp_path / "huge").write_bytes(b"-" * (LARGEST_KEY + 1))
    for name, words in (("x", "Ed25519"), ("junk", "no private key"), ("huge", "bytes"), ("none", "cannot read")):
        with pytest.raises(UserError, match=f"{name}.*{words}"):
            read_signing_key(tmp_path / name)
    for name, words in (("x.pub", "Ed25519"), ("junk", "no public key"), ("good", "private key"), ("huge", "bytes")):
        with pytest.raises(UserError, match=f"{name}.*{words}"):
            read_public_key(tmp_path / name)


# --- envelopes ---


def test_the_signed_bytes_are_those_of_the_specification(key: SigningKey) -> None:
    assert signed_bytes("http://example.com/HelloWorld", b"hello world") == (
        b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
    )
    assert signed_bytes("ä", b"") == b"DSSEv1 2 \xc3\xa4 0 "
    envelope = sealed(KIND, {"b": 1, "a": [2.0]}, key)
    assert base64.b64decode(envelope.payload) == b'{"a":[2],"b":1}'
    message = f"DSSEv1 {len(KIND)} {KIND} 15 ".encode() + b'{"a":[2],"b":1}'
    Ed25519PublicKey.from_public_bytes(key.public.raw).verify(
        base64.b64decode(envelope.signatures[0].sig), message
    )  # raises if it does not hold


def test_every_flipped_bit_of_an_envelope_is_refused(key: SigningKey, other: SigningKey) -> None:
    content = countersigned(sealed(KIND, {"figure": 12.5}, key), other).file_bytes()
    assert open_envelope(content, KIND, "it").content == b'{"figure":12.5}'
    for place in range(len(content)):
        for bit in range(8):
            altered = bytearray(content)
            altered[place] ^= 1 << bit
            with pytest.raises(Refuted):
                open_envelope(bytes(altered), KIND, "it")


def test_base64_has_one_spelling() -> None:
    assert decoded("QQ==", "it") == b"A" and encoded(b"A") == "QQ=="
    for other in ("QR==", "QQ", "QQ=\n=", "QQ== ", "Q-==", "ü"):
        with pytest.raises(Refuted, match="it is not base64"):
            decoded(other, "it")


def test_a_signature_under_another_key_type_or_twice_is_refused(key: SigningKey, other: SigningKey) -> None:
    envelope = sealed(KIND, {"a": 1}, key)
    first = envelope.signatures[0]
    stolen = first.model_copy(update={"keyid": other.public.id, "public": encoded(other.public.raw)})

    def opened(*signatures: object, kind: str = KIND) -> Envelope:
        table = {
            **envelope.model_dump(mode="json"),
            "signatures": [each.model_dump(mode="json") for each in signatures],
        }  # type: ignore[attr-defined]
        return open_envelope(canonical(table), kind, "it")

    assert opened(first) == envelope
    for signatures, words in (
        ((stolen,), "does not hold"),
        ((first, first), "signed twice"),
        ((first.model_copy(update={"keyid": other.public.id}),), "its key is not"),
        ((first.model_copy(update={"sig": encoded(b"short")}),), "length"),
        ((first.model_copy(update={"public": encoded(b"short"), "keyid": hashed(b"short")}),), "length"),
        ((), "signatures"),
    ):
        with pytest.raises(Refuted, match=words):
            opened(*signatures)
    with pytest.raises(Refuted, match="not 'another/kind'"):
        opened(first, kind="another/kind")
    with pytest.raises(UserError, match="signed already"):
        countersigned(envelope, key)
    both = countersigned(envelope, other)
    assert [each.keyid for each in both.signatures] == [key.public.id, other.public.id]
    assert open_envelope(both.file_bytes(), KIND, "it") == both
    assert json.loads(both.file_bytes())["payloadType"] == KIND
