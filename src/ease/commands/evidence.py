"""`ease certificate`, `ease verify` and `ease keys new`: issue, sign and check evidence."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import Field
from rich.console import RenderableType
from rich.text import Text

from ease.config import Config
from ease.console import labelled, plain, status
from ease.errors import UserError
from ease.operations.evidence.canonical import hashed
from ease.operations.evidence.certificates import answer_named, read_certificate
from ease.operations.evidence.checks import Check, Signer, Verification, verify
from ease.operations.evidence.envelope import Envelope, countersigned
from ease.operations.evidence.events import issue
from ease.operations.evidence.keys import PublicKey, new_key, public_path, read_public_key, read_signing_key
from ease.operations.evidence.page import certificate_page
from ease.operations.evidence.statement import VerdictWords
from ease.operations.evidence.witnesses import countersign
from ease.operations.ledger.names import answer_name
from ease.operations.ledger.store import Ledger
from ease.operations.ledger.verification import ledger_checks, log_check
from ease.runs.run import Run
from ease.storage import remove_leftovers_of, write_atomic


class KeysSummary(Config):
    """`ease keys new`: a key pair."""

    private: Path
    public: Path
    key_id: str

    def render(self) -> Iterator[RenderableType]:
        yield f"private key, only for its owner: {self.private}"
        yield f"public key, for everyone: {self.public}"
        yield f"key id: {self.key_id}"


def make_keys(path: Path) -> KeysSummary:
    key = new_key(path)
    return KeysSummary(private=path, public=public_path(path), key_id=key.public.id)


class CertificateSummary(Config):
    """`ease certificate`, and `ease certificate sign` of a certificate that holds."""

    certificate: Path
    page: Path | None
    """The page for people, if one was requested."""
    sha256: str
    """Hash of the signed statement."""
    signatures: tuple[str, ...]
    """Ids of the keys."""
    verdict: str
    """The verdict in words."""
    unchecked: tuple[str, ...] = ()
    """Parts that the signer could not check."""

    def render(self) -> Iterator[RenderableType]:
        yield self.verdict
        yield from (f"signed by {each}" for each in self.signatures)
        yield from (labelled("not checked", each, "yellow") for each in self.unchecked)
        yield f"certificate in {self.certificate}"
        if self.page is not None:
            yield f"page for people in {self.page}; it checks itself, offline"


def certify_run(folder: Path, name: str, html: bool, out: Path | None, quiet: bool) -> CertificateSummary:
    """Issue a certificate, by default next to the result that it certifies."""
    run = Run.load(folder)
    name = answer_name(folder, name)
    path = out or answer_named(run, name)[0].folder / "certificate.json"
    _check_names(path, html)
    with status("gathering evidence", quiet):
        envelope = issue(run, name)
    return _written(path, envelope, html)


def sign_certificate(
    path: Path, key: Path, folder: Path | None, quick: bool, html: bool, out: Path | None, quiet: bool
) -> "CertificateSummary | VerifySummary":
    """Add a signature to a certificate that holds. Otherwise return the reasons and sign nothing."""
    signer = read_signing_key(key)
    _check_names(out or path, html)
    with status("checking before signing", quiet):
        found = verify(path, None if folder is None else Run.load(folder), quick=quick)
    if not found.holds:
        return VerifySummary.of(path, found, "not signed")
    envelope, _ = read_certificate(path)
    unchecked = tuple(check.words for check in found.checks if check.holds is None)
    return _written(out or path, countersigned(envelope, signer), html, unchecked)


def _check_names(path: Path, html: bool) -> None:
    if html and path.suffix == ".html":
        raise UserError(
            f"{path}: is the name of the page; name the certificate .json, and the page is written next to it"
        )


def _written(path: Path, envelope: Envelope, html: bool, unchecked: tuple[str, ...] = ()) -> CertificateSummary:
    remove_leftovers_of(path)
    write_atomic(path, envelope.file_bytes() + b"\n")
    _, certificate = read_certificate(path)
    page = path.with_suffix(".html") if html else None
    if page is not None:
        remove_leftovers_of(page)
        write_atomic(page, certificate_page(envelope, certificate).encode())
    return CertificateSummary(
        certificate=path,
        page=page,
        sha256=hashed(envelope.content),
        signatures=tuple(each.keyid for each in envelope.signatures),
        verdict=certificate.verdict.words,
        unchecked=unchecked,
    )


class VerifySummary(Config):
    """`ease verify`, and `ease certificate sign` of a certificate that is refused."""

    certificate: Path
    holds: bool
    reasons: tuple[str, ...]
    """Why it is refused."""
    checks: tuple[Check, ...]
    signatures: tuple[Signer, ...]
    verdict: VerdictWords | None
    """What it states. Null if it could not be read."""
    refusal: str = Field("refused", exclude=True)
    """The action taken with a certificate that is refused."""

    @classmethod
    def of(cls, path: Path, found: Verification, refusal: str = "refused") -> "VerifySummary":
        return cls(
            certificate=path,
            holds=found.holds,
            reasons=found.reasons,
            checks=found.checks,
            signatures=found.signers,
            verdict=None if found.certificate is None else found.certificate.verdict,
            refusal=refusal,
        )

    def render(self) -> Iterator[RenderableType]:
        marks = {True: ("holds", "green"), False: ("refused", "red"), None: ("not checked", "yellow")}
        for check in self.checks:
            word, style = marks[check.holds]
            yield Text.assemble((f"{word}: ", style), f"{plain(check.name)}: {plain(check.words)}")
        for signer in self.signatures:
            yield labelled("signed by", f"{signer.name or 'an unnamed key'}, {signer.key_id}")
        if not self.holds:
            yield f"{self.certificate}: {self.refusal}"
            return
        yield f"{self.certificate}: nothing contradicts it"
        if self.verdict is not None:
            yield labelled("it says", self.verdict.words)


def verify_certificate(
    path: Path, folder: Path | None, keys: Sequence[str], model: Path | None, quick: bool, quiet: bool
) -> VerifySummary:
    run = None if folder is None else Run.load(folder)
    named = known_keys(keys)
    if model is not None and not model.is_file():
        raise UserError(f"{model}: no such file; name the model that the certificate should be about")
    if path.is_dir():
        return _verified_run(path)
    with status("checking", quiet):
        found = verify(path, run, named, model, quick)
        if run is not None:
            found = replace(found, checks=(*found.checks, *ledger_checks(run)))
        return VerifySummary.of(path, found)


def _verified_run(folder: Path) -> VerifySummary:
    """Check log, ledger and countersignatures of a run without a certificate."""
    run = Run.load(folder)
    return VerifySummary.of(folder, Verification((log_check(run), *ledger_checks(run))))


class WitnessSummary(Config):
    """`ease certificate attest`: the countersignature."""

    path: Path
    key_id: str

    def render(self) -> Iterator[RenderableType]:
        yield f"signed by {self.key_id}"
        yield f"countersignature in {self.path}; keep a copy of it, away from the run"


def witness_run(folder: Path, key: Path) -> WitnessSummary:
    """Sign how far the log and the ledger of a run go, after checking both."""
    run, signer = Run.load(folder), read_signing_key(key)
    checks = (log_check(run), *ledger_checks(run))
    if reason := next((each.words for each in checks if each.holds is False), None):
        raise UserError(f"not signed: {reason}")
    path, envelope = countersign(run, signer, Ledger(folder).check())
    return WitnessSummary(path=path, key_id=envelope.signatures[0].keyid)


def known_keys(texts: Sequence[str]) -> dict[str, PublicKey]:
    """Public keys from `FILE` or `NAME=FILE`, by the names of their owners."""
    found: dict[str, PublicKey] = {}
    for text in texts:
        name, separator, file = text.partition("=")
        if not separator or Path(text).is_file():
            name, file = Path(text).name.removesuffix(".pub").removesuffix(".key"), text
        if name in found:
            raise UserError(f"--key {text}: there is a key called {name} already; write --key OTHERNAME={file}")
        found[name] = read_public_key(Path(file))
    return found
