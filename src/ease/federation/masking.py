"""Building blocks of secure aggregation (Bonawitz et al., 2017): keys, mask streams, secret shares and sealed shares.

Masks are 64-bit integers and add modulo 2^64. Everything here is a function of its arguments; who keeps what, and who
sends what to whom, is in `secure.py`.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from ease.errors import UserError

SECRET = 32
"""Bytes of every secret, public key, nonce and hash."""
CARD = 4 * SECRET
"""Bytes of what a client advertises."""
PRIME = (1 << 521) - 1
"""Modulus of the secret shares: a prime larger than any secret."""
SHARE = 66
"""Bytes of a number below the prime."""
SEALED = 2 * SHARE + 16
"""Bytes of two sealed shares: the shares and the authentication tag."""
NO_NONCE = bytes(12)
"""Each key seals a single message, so that its nonce may be constant."""


def derived(secret: bytes, salt: bytes, purpose: bytes, length: int = SECRET) -> bytes:
    """Bytes derived from a secret by HKDF-SHA256, independent for each purpose."""
    return HKDF(SHA256(), length, salt, b"ease secure aggregation: " + purpose).derive(secret)


# --- keys ---


@dataclass(frozen=True)
class Card:
    """The advertisement of a client: public keys, a commitment to its self-mask, and the nonce that its keys derive
    from."""

    sealing: bytes
    masking: bytes
    commitment: bytes
    nonce: bytes

    def to_bytes(self) -> bytes:
        return self.sealing + self.masking + self.commitment + self.nonce

    @classmethod
    def from_bytes(cls, data: bytes) -> "Card":
        return cls(*(data[start : start + SECRET] for start in range(0, CARD, SECRET)))


@dataclass(frozen=True)
class Keys:
    """A client's secrets of one aggregation, derived from its long-lived secret and a fresh nonce."""

    sealing: X25519PrivateKey
    """Agrees on the keys that seal shares."""
    masking: X25519PrivateKey
    """Agrees on pairwise masks; its shares are revealed if the client drops out."""
    self_mask: bytes
    """Seed of the mask that only this client adds; its shares are revealed if the client does not drop out."""
    nonce: bytes

    @classmethod
    def of(cls, secret: bytes, nonce: bytes) -> "Keys":
        sealing, masking, self_mask = (derived(secret, nonce, each) for each in (b"sealing", b"masking", b"self"))
        return cls(private_key(sealing), private_key(masking), self_mask, nonce)

    @property
    def card(self) -> Card:
        sealing, masking = (key.public_key().public_bytes_raw() for key in (self.sealing, self.masking))
        return Card(sealing, masking, commitment(self.self_mask), self.nonce)


def private_key(secret: bytes) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(secret)


def public_bytes(secret: bytes) -> bytes:
    """The public half of a private key given as bytes."""
    return private_key(secret).public_key().public_bytes_raw()


def commitment(secret: bytes) -> bytes:
    """Binds to a secret of full entropy without revealing it."""
    return hashlib.sha256(b"ease secure aggregation: commitment" + secret).digest()


def agreed(own: X25519PrivateKey, other: bytes, session: bytes, purpose: bytes) -> bytes:
    """The key that two clients agree on, for one session and purpose."""
    try:
        shared = own.exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError as error:
        raise UserError("secure aggregation: a public key is not valid; run the same command again") from error
    return derived(shared, session, purpose)


# --- masks ---


def stream(seed: bytes, length: int) -> np.ndarray:
    """So many uniform 64-bit integers, expanded from a seed by ChaCha20."""
    expanded = Cipher(ChaCha20(seed, bytes(16)), mode=None).encryptor().update(bytes(8 * length))
    return np.frombuffer(expanded, dtype="<u8").astype(np.uint64, copy=False)


def pairwise(own: X25519PrivateKey, other: bytes, session: bytes, positive: bool, length: int) -> np.ndarray:
    """The mask of a pair of clients as one of them adds it. The other one adds its negative."""
    mask = stream(agreed(own, other, session, b"pairwise mask"), length)
    return mask if positive else np.negative(mask)


# --- secret shares ---


def split(secret: bytes, points: Sequence[int], threshold: int, randomness: bytes) -> dict[int, bytes]:
    """Point -> its share; any `threshold` of the shares give the secret, and fewer reveal nothing (Shamir, 1979)."""
    drawn = derived(randomness, b"", b"polynomial")
    numbers = stream(drawn, 9 * (threshold - 1)).reshape(threshold - 1, 9)
    polynomial = [int.from_bytes(secret), *(int.from_bytes(row.tobytes()[:SHARE]) % PRIME for row in numbers)]

    def value(point: int) -> int:
        total = 0
        for coefficient in reversed(polynomial):
            total = (total * point + coefficient) % PRIME
        return total

    return {point: value(point).to_bytes(SHARE) for point in points}


def combined(shares: Mapping[int, bytes]) -> bytes | None:
    """The secret that shares give by interpolation at zero, or None if they are shares of no secret."""
    weights = _weights(tuple(shares))
    total = sum(int.from_bytes(share) * weight for share, weight in zip(shares.values(), weights, strict=True)) % PRIME
    return total.to_bytes(SECRET) if total < 1 << 8 * SECRET else None


@lru_cache(maxsize=16)
def _weights(points: tuple[int, ...]) -> tuple[int, ...]:
    """What each share counts in the interpolation at zero; the same for all secrets that the same clients reveal."""
    found = []
    for point in points:
        over = under = 1
        for other in points:
            if other != point:
                over, under = over * other % PRIME, under * (other - point) % PRIME
        found.append(over * pow(under, -1, PRIME))
    return tuple(found)


def sealed(own: X25519PrivateKey, other: bytes, session: bytes, way: bytes, message: bytes) -> bytes:
    """A message encrypted for one client; `way` names sender and recipient."""
    return ChaCha20Poly1305(agreed(own, other, session, b"seal " + way)).encrypt(NO_NONCE, message, way)


def opened(own: X25519PrivateKey, other: bytes, session: bytes, way: bytes, message: bytes) -> bytes | None:
    """The sealed message, or None if it was altered."""
    try:
        return ChaCha20Poly1305(agreed(own, other, session, b"seal " + way)).decrypt(NO_NONCE, message, way)
    except InvalidTag:
        return None
