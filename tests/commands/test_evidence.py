"""`ease keys`, `ease certificate` and `ease verify`: files, exit codes, reasons, and what a leaving client does."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ease.commands.evidence import known_keys
from ease.errors import UserError
from ease.methods.finetune import Finetune
from ease.operations.evidence import new_key, read_certificate
from ease.operations.evidence.keys import public_path
from ease.requests.request import ClientRequest
from ease.runs.config import RunConfig
from ease.runs.forget import forget
from ease.runs.run import Run
from ease.runs.world import World


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, world: World, small_config: Callable[..., RunConfig]) -> Path:
    """A small run in which client 1 was forgotten."""
    run = Run.create(tmp_path_factory.mktemp("certified") / "run", small_config())
    list(run.train(world))
    list(forget(run, world, ClientRequest(clients=(1,)), Finetune()))
    return run.folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture
def certificate(run: Path, ease) -> Path:
    result = ease("certificate", run, "--request", "client-1/finetune", "--out", run.parent / "certificate.json")
    assert result.code == 0, result.err
    return run.parent / "certificate.json"


def test_a_certificate_and_its_page_are_next_to_its_result(run: Path, ease) -> None:
    result = ease("certificate", run, "--request", "client-1/finetune", "--html", "--json")
    reported = json.loads(result.out)
    folder = run / "requests" / "client-1" / "finetune"
    assert (reported["certificate"], reported["page"]) == (
        str(folder / "certificate.json"),
        str(folder / "certificate.html"),
    )
    assert "not audited" in reported["verdict"] and len(reported["signatures"]) == 1
    for name in ("certificate.json", "certificate.html"):
        assert (folder / name).stat().st_mode & 0o777 == 0o600
    issued = ease("certificate", "issue", run, "--request", "client-1/finetune")
    assert issued.code == 0 and f"signed by {reported['signatures'][0]}" in issued.out


def test_exit_codes_separate_valid_invalid_and_user_errors(run: Path, certificate: Path, ease) -> None:
    held = ease("verify", certificate, "--run", run, "--json")
    reported = json.loads(held.out)
    assert held.code == 0 and reported["holds"] is True and reported["reasons"] == []
    assert reported["signatures"][0]["name"] == "the run" and reported["verdict"]["passed"] is None
    model = run / "requests" / "client-1" / "finetune" / "model.safetensors"
    assert ease("verify", certificate, "--model", model).code == 0
    model.write_bytes(model.read_bytes() + b"\0")
    refused = ease("verify", certificate, "--run", run, "--quick", "--json")
    assert refused.code == 1 and "model.safetensors" in json.loads(refused.out)["reasons"][0]
    shown = ease("verify", certificate, "--run", run, "--quick")
    assert shown.code == 1 and "refused: model.safetensors:" in shown.out and "certificate.json: refused" in shown.out
    assert ease("verify", run).code == 0, "log and ledger of a run"
    for arguments in (
        (run / "none.json",),
        (certificate, "--run", run.parent),
        (certificate, "--key", run / "none.pub"),
        (certificate, "--model", run / "none.safetensors"),
    ):
        mistaken = ease("verify", *arguments)
        assert mistaken.code == 2 and mistaken.err.startswith("error: ") and mistaken.err.count("\n") == 1, arguments


def test_files_that_are_not_certificates_are_refused(run: Path, certificate: Path, ease) -> None:
    for content in (b"", b"{}\n", b"null\n", b"[]\n", b"\xff" * 100):
        certificate.write_bytes(content)
        result = ease("verify", certificate)
        assert result.code == 1 and "refused: signatures:" in result.out


def test_a_leaving_client_checks_and_signs(run: Path, certificate: Path, tmp_path: Path, ease) -> None:
    made = json.loads(ease("keys", "new", tmp_path / "client.key", "--json").out)
    assert Path(made["private"]).stat().st_mode & 0o777 == 0o600
    signed = ease("certificate", "sign", certificate, "--key", made["private"], "--run", run, "--html", "--json")
    reported = json.loads(signed.out)
    assert (
        signed.code == 0
        and reported["unchecked"] == []
        and reported["signatures"][1] == made["key_id"]
        and Path(reported["page"]).is_file()
    )
    public = run / "evidence" / "signing.key.pub"
    found = ease("verify", certificate, "--key", f"client={made['public']}", "--key", f"operator={public}")
    assert found.code == 0
    assert f"signed by: client, {made['key_id']}" in found.out and "signed by: operator, " in found.out
    again = ease("certificate", "sign", certificate, "--key", made["private"])
    assert again.code == 2 and "signed already" in again.err


def test_no_one_signs_what_does_not_hold(run: Path, certificate: Path, tmp_path: Path, ease) -> None:
    new_key(tmp_path / "client.key")
    kept = certificate.read_bytes()
    record = run / "requests" / "client-1" / "finetune" / "record.json"
    record.write_bytes(record.read_bytes().replace(b"recall@1", b"recall@2", 1))
    result = ease("certificate", "sign", certificate, "--key", tmp_path / "client.key", "--run", run)
    assert result.code == 1 and "not signed" in result.out and certificate.read_bytes() == kept
    certificate.write_bytes(kept[:-2] + b"\n")
    result = ease("certificate", "sign", certificate, "--key", tmp_path / "client.key")
    assert result.code == 1 and certificate.read_bytes() == kept[:-2] + b"\n"


def test_signing_may_keep_the_original(certificate: Path, tmp_path: Path, ease) -> None:
    new_key(tmp_path / "client.key")
    kept, out = certificate.read_bytes(), tmp_path / "both.json"
    signed = ease("certificate", "sign", certificate, "--key", tmp_path / "client.key", "--out", out)
    assert signed.code == 0 and "not checked: neither the log nor any figure was checked" in signed.out
    assert certificate.read_bytes() == kept and len(read_certificate(out)[0].signatures) == 2


def test_user_errors_are_one_line(run: Path, certificate: Path, tmp_path: Path, ease) -> None:
    for arguments, words in (
        (("certificate", run, "--request", "client-2"), "no finished request"),
        (("certificate", run, "--request", "../client-1"), "no name of an answer"),
        (("certificate", run, "--request", "client-1/finetune", "--html", "--out", tmp_path / "x.html"), ".json"),
        (("certificate", tmp_path / "nothing", "--request", "client-1"), "no run here"),
        (("certificate", "sign", certificate, "--key", certificate), "certificate.json"),
        (("keys", "new", certificate), "never written over"),
    ):
        result = ease(*arguments)
        assert result.code == 2 and words in result.err and result.err.count("\n") == 1, arguments


def test_keys_go_by_names(tmp_path: Path) -> None:
    for name in ("a.key", "b=c"):
        new_key(tmp_path / name)
    first, second = (public_path(tmp_path / name) for name in ("a.key", "b=c"))
    assert set(known_keys([str(first), str(second), f"ours={first}"])) == {"a", "b=c", "ours"}
    with pytest.raises(UserError, match="called a already"):
        known_keys([str(first), f"a={second}"])
