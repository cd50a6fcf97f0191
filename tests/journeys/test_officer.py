"""A data protection officer verifies a certificate by the page written for one; a changed one is refused."""

import base64
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
PAGE = (Path(__file__).parents[2] / "docs" / "officer.md").read_text()


@pytest.fixture(scope="module")
def desk(answered, shared_cache: Path, tmp_path_factory: pytest.TempPathFactory, command) -> Path:
    """What the officer was sent, and a copy of the run under the name that the page uses."""
    folder = tmp_path_factory.mktemp("desk")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EASE_CACHE", str(shared_cache))
        name = answered.answer("request-3")
        command(
            "certificate", answered.run, "--request", name, "--out", folder / "certificate.json", "--html", "--quiet"
        )
    shutil.copy(answered.run / "evidence" / "signing.key.pub", folder / "hospital.pub")
    shutil.copy(answered.run / "requests" / name / "model.safetensors", folder)
    shutil.copytree(answered.run, folder / "runs" / "first")
    return folder


@pytest.fixture(autouse=True)
def sit_down(desk: Path, monkeypatch) -> None:
    monkeypatch.chdir(desk)


def test_the_commands_of_the_page_find_nothing_against_it(command) -> None:
    shown = re.findall(r"^ease (verify .*)$", PAGE.split("## How to verify a certificate")[1], re.MULTILINE)
    assert len(shown) == 2
    for line in shown:
        assert "nothing contradicts it" in command(*shlex.split(line))
    model = command("verify", "certificate.json", "--key", "hospital=hospital.pub", "--model", "model.safetensors")
    assert "nothing contradicts it" in model


def test_it_says_that_there_is_not_a_verdict_without_an_audit(command) -> None:
    found = json.loads(command("verify", "certificate.json", "--json"))
    assert found["verdict"]["passed"] is None and found["verdict"]["words"].startswith("No verdict")


def test_a_changed_figure_is_refused(attempt) -> None:
    envelope = json.loads(Path("certificate.json").read_text())
    content = base64.b64decode(envelope["payload"])
    forged = content.replace(b'"No verdict', b'"In verdict', 1)
    assert forged != content
    envelope["payload"] = base64.b64encode(forged).decode()
    Path("forged.json").write_text(json.dumps(envelope, separators=(",", ":"), sort_keys=True) + "\n")
    code, out, _ = attempt("verify", "forged.json", "--key", "hospital=hospital.pub")
    assert code == 1 and "refused" in out and "signature" in out


def test_another_key_and_another_model_are_refused(attempt, command) -> None:
    command("keys", "new", "stranger.key")
    code, out, _ = attempt("verify", "certificate.json", "--key", "hospital=stranger.key.pub")
    assert code == 1 and "refused" in out
    changed = bytearray(Path("model.safetensors").read_bytes())
    changed[-1] ^= 1
    Path("other.safetensors").write_bytes(changed)
    code, out, _ = attempt("verify", "certificate.json", "--model", "other.safetensors")
    assert code == 1 and "refused" in out


def test_the_request_is_on_record_with_ground_and_steps(command) -> None:
    shown = command("request", "show", "runs/first", "request-0")
    for part in ("GDPR art. 17(1)(b)", "site north", "approved", "the engineer"):
        assert part in shown


def test_no_name_of_a_photograph_is_in_the_certificate(answered) -> None:
    content = base64.b64decode(json.loads(Path("certificate.json").read_text())["payload"]).decode()
    for pair_id in (answered.folder / "ids.txt").read_text().split():
        assert f'"{pair_id}"' not in content
