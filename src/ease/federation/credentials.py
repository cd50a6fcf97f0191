"""Keys of a federation: its own authority, the server's certificate, and one key for each client's node.

A node is identified by its key: the server records each client's key, and without that key no node can act as the
client."""

import base64
import datetime
import hashlib
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_public_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from pydantic import Field

from ease.config import Config, validate
from ease.errors import UserError
from ease.storage import read_bytes, read_json, whole_or_none, write_atomic, write_json

DAYS = 825
"""For which a certificate holds."""
LARGEST_KEY = 1 << 14


@dataclass(frozen=True)
class Authority:
    """Files that make a server known to its nodes."""

    folder: Path

    @property
    def certificate(self) -> Path:
        """What every node is given, to know the server by."""
        return self.folder / "ca.crt"

    @property
    def server_certificate(self) -> Path:
        return self.folder / "server.crt"

    @property
    def server_key(self) -> Path:
        return self.folder / "server.key"


class Admitted(Config):
    """Clients of a federation by their numbers, and the public key of each one's node in OpenSSH's form."""

    clients: dict[str, str] = Field(default_factory=dict)

    def by_key(self) -> dict[str, int]:
        """Public key in hex, as Flower reports it -> client."""
        return {
            public_key(text.encode(), f"client {client}").hex(): int(client) for client, text in self.clients.items()
        }


def make_authority(folder: Path, hosts: Sequence[str]) -> Authority:
    """An authority and the certificate of a server that is reached under these names and addresses.

    The authority's own key signs this one certificate and is not kept: no one can make a second server with it.
    """
    made = Authority(folder)
    if made.certificate.exists():
        raise UserError(f"{made.certificate}: is there already; nodes know the server by it. Choose another folder")
    root_key, key = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    root = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "EASE federation")])
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0][:64])])
    identity = x509.SubjectKeyIdentifier.from_public_key(root_key.public_key())
    authority = (
        _certificate(root, root, root_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(identity, critical=False)
        .sign(root_key, hashes.SHA384())
    )
    server = (
        _certificate(subject, root, key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_host(each) for each in hosts]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identity), critical=False)
        .sign(root_key, hashes.SHA384())
    )
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    if made.server_key.exists():
        raise UserError(f"{made.server_key}: is there already without its certificate; delete it and run again")
    with whole_or_none(made.server_key, made.server_certificate, made.certificate):
        write_private(made.server_key, private)
        write_atomic(made.server_certificate, server.public_bytes(Encoding.PEM))
        write_atomic(made.certificate, authority.public_bytes(Encoding.PEM))
    return made


def make_node_key(path: Path) -> Path:
    """A key pair for a node; the public half is next to it, as .pub."""
    public = path.with_name(f"{path.name}.pub")
    if path.exists() or public.exists():
        raise UserError(f"{path}: is there already; choose another name")
    key = ec.generate_private_key(ec.SECP384R1())
    with whole_or_none(path, public):
        write_private(path, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
        write_atomic(public, key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n")
    return public


def write_private(path: Path, content: bytes) -> None:
    """A file that its owner alone may read, from its first byte on."""
    write_atomic(path, content)  # made for its owner alone


def public_key(text: bytes, what: str) -> bytes:
    """A public key in OpenSSH's format, in the form that Flower reports."""
    try:
        key = load_ssh_public_key(text)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise UserError(f"{what}: no public key in OpenSSH's form; make one with: ease keys node FILE") from error
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise UserError(f"{what}: not an elliptic-curve key; make one with: ease keys node FILE")
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def read_admitted(folder: Path) -> Admitted:
    path = folder / "clients.json"
    return validate(Admitted, read_json(path), str(path)) if path.is_file() else Admitted()


def admit(folder: Path, client: int, key: Path) -> None:
    """Admit the node with this key, and no other, as this client. A key belongs to one client."""
    text, known = read_bytes(key, LARGEST_KEY), read_admitted(folder)
    holder = known.by_key().get(public_key(text, str(key)).hex(), client)
    if holder != client:
        raise UserError(f"{key}: is the key of client {holder} already; every client needs a key of its own")
    clients = {**known.clients, str(client): " ".join(text.decode().split()[:2])}
    write_json(folder / "clients.json", Admitted(clients=clients).model_dump(mode="json"))


def revoke(folder: Path, client: int) -> str:
    """Take the key of a client's node back, so that nobody can act for it; return the key's fingerprint."""
    known = read_admitted(folder)
    text = known.clients.get(str(client))
    if text is None:
        admitted = ", ".join(sorted(known.clients, key=int)) or "none"
        raise UserError(f"--id {client}: no key is admitted for this client; admitted: {admitted}")
    clients = {each: key for each, key in known.clients.items() if each != str(client)}
    write_json(folder / "clients.json", Admitted(clients=clients).model_dump(mode="json"))
    return fingerprint(text)


def fingerprint(text: str) -> str:
    """Return the hash by which people compare a public key, as `ssh-keygen -l` prints it."""
    try:
        blob = base64.b64decode(text.split()[1], validate=True)
    except (IndexError, ValueError) as error:
        raise UserError("clients.json: a key is not in OpenSSH's form; admit it again") from error
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def expiry(path: Path) -> datetime.datetime:
    """Return when a certificate ends."""
    try:
        return x509.load_pem_x509_certificate(read_bytes(path, LARGEST_KEY)).not_valid_after_utc
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: is not a certificate in PEM; make one with `ease keys server`") from error


def rotate_authority(folder: Path, hosts: Sequence[str], today: str) -> tuple[Authority, Path]:
    """Make a new authority and server certificate; return it, and where the old one is kept."""
    old, aside = Authority(folder), folder / f"until-{today}"
    if not old.certificate.is_file():
        raise UserError(f"{old.certificate}: no certificate to rotate; make one with `ease keys server`")
    if aside.exists():
        raise UserError(f"{aside}: exists already; certificates were rotated today")
    aside.mkdir(mode=0o700)
    for path in (old.certificate, old.server_certificate, old.server_key):
        if path.is_file():
            path.rename(aside / path.name)
    return make_authority(folder, hosts), aside


def server_hosts(folder: Path) -> list[str]:
    """Return the names and addresses that the certificate of a server holds."""
    path = Authority(folder).server_certificate
    try:
        certificate = x509.load_pem_x509_certificate(read_bytes(path, LARGEST_KEY))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: is not a certificate in PEM; make one with `ease keys server`") from error
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(each.value) for each in names]


def _certificate(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=DAYS))
    )


def _usage(signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
