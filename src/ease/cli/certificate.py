"""`ease certificate`: issue, sign and attest."""

from pathlib import Path
from typing import Annotated

import typer

from ease.cli.options import REFUTED, Certificate, CheckQuick, Quiet, Result, Run, command

Html = Annotated[bool, typer.Option("--html", help="Also write a page for people, which checks itself.")]


@command
def issue(
    run: Run,
    request: Annotated[str, typer.Option(help="The result to certify, e.g. client-3 or client-3/finetune.")],
    html: Html = False,
    out: Annotated[Path | None, typer.Option(help="The file. By default certificate.json beside the result.")] = None,
    quiet: Quiet = False,
) -> Result:
    """Certify the result of a request.

    The certificate states models, code, settings, figures and verdict. It is logged and signed.

    Example: `ease certificate runs/first --request client-3 --html`
    """
    from ease.commands.evidence import certify_run

    return certify_run(run, request, html, out, quiet)


@command
def sign(
    certificate: Certificate,
    key: Annotated[Path, typer.Option(help="The private key of the signer, made by `ease keys new`.")],
    run: Annotated[Path | None, typer.Option(help="The run, to compute everything again before signing.")] = None,
    quick: CheckQuick = False,
    html: Html = False,
    out: Annotated[Path | None, typer.Option(help="The file. By default CERT itself.")] = None,
    quiet: Quiet = False,
) -> Result:
    """Check a certificate and add a signature.

    Everything that can be checked from here is checked first. Exit code 1 if the certificate is refused.

    Example: `ease certificate sign certificate.json --key client.key --run runs/first`
    """
    from ease.commands.evidence import VerifySummary, sign_certificate

    summary = sign_certificate(certificate, key, run, quick, html, out, quiet)
    return summary, REFUTED if isinstance(summary, VerifySummary) else 0


@command
def attest(run: Run, key: Annotated[Path, typer.Option(help="Private key of the witness.")]) -> Result:
    """Countersign how far the log and ledger of a run go.

    The witness checks both and keeps a copy of the file. `ease verify RUN` then refuses a run whose log or ledger was
    rewritten since.

    Example: `ease certificate attest runs/first --key witness.key`
    """
    from ease.commands.evidence import witness_run

    return witness_run(run, key)
