"""Ed25519 keys as files: private ones readable only by their owner, public ones next to them, named by a hash."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from ease.errors import UserError
from ease.storage import read_bytes, whole_or_none, write_atomic

LARGEST_KEY = 1 << 14
"""Bytes of the largest file that is taken for a key."""


@dataclass(frozen=True)
class PublicKey:
    """Who signed, as 32 bytes."""

    raw: bytes

    @property
    def id(self) -> str:
        return hashlib.sha256(self.raw).hexdigest()

    def signed(self, message: bytes, signature: bytes) -> bool:
        try:
            Ed25519PublicKey.from_public_bytes(self.raw).verify(signature, message)
        except (InvalidSignature, ValueError):
            return False
        return True

    def pem(self) -> bytes:
        key = Ed25519PublicKey.from_public_bytes(self.raw)
        return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


@dataclass(frozen=True)
class SigningKey:
    """What signs; never shown."""

    _key: Ed25519PrivateKey

    @property
    def public(self) -> PublicKey:
        return PublicKey(self._key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw))

    def sign(self, message: bytes) -> bytes:
        return self._key.sign(message)

    def __repr__(self) -> str:
        return f"SigningKey({self.public.id})"


def public_path(path: Path) -> Path:
    """Path of the public half of a key."""
    return path.with_name(path.name + ".pub")


def new_key(path: Path) -> SigningKey:
    """Make a key pair: the private half in `path`, for its owner alone (0600), the public one beside it.

    A private key whose public half a killed process did not write is completed.
    """
    if path.is_file() and not path.is_symlink() and not public_path(path).exists():
        try:
            begun = read_signing_key(path)
        except UserError as error:
            raise UserError(f"{path}: exists already, and a key is never written over; name another file") from error
        write_atomic(public_path(path), begun.public.pem())
        return begun
    for each in (path, public_path(path)):
        if each.exists() or each.is_symlink():
            raise UserError(f"{each}: exists already, and a key is never written over; name another file")
    key = Ed25519PrivateKey.generate()
    made = SigningKey(key)
    with whole_or_none(path, public_path(path)):
        write_atomic(path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        write_atomic(public_path(path), made.public.pem())
    return made


def read_signing_key(path: Path) -> SigningKey:
    try:
        key = load_pem_private_key(_pem(path), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise UserError(
            f"{path}: no private key in PEM without a password; make one with: ease keys new FILE"
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise UserError(f"{path}: not an Ed25519 key; make one with: ease keys new FILE")
    return SigningKey(key)


def read_public_key(path: Path) -> PublicKey:
    content = _pem(path)
    if b"PRIVATE KEY" in content:
        raise UserError(f"{path}: is a private key, which signs and is shown to no one; name the .pub file beside it")
    try:
        key = load_pem_public_key(content)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise UserError(f"{path}: no public key in PEM; name the .pub file that `ease keys new` wrote") from error
    if not isinstance(key, Ed25519PublicKey):
        raise UserError(f"{path}: not an Ed25519 key; name the .pub file that `ease keys new` wrote")
    return PublicKey(key.public_bytes(Encoding.Raw, PublicFormat.Raw))


def _pem(path: Path) -> bytes:
    try:
        return read_bytes(path, LARGEST_KEY)
    except OSError as error:
        raise UserError(f"{path}: cannot read this key ({error.strerror}); check the path") from error
