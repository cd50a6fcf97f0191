"""Records are read by the model that wrote them; what is not one is refused in one line with file, field, remedy."""

import json
from pathlib import Path
from typing import Any

import pytest

from ease.audit.records import Price
from ease.errors import UserError
from ease.requests.request import ClientRequest
from ease.runs.records import AnswerRecord, ContributionNotes, RoundRecord, read_record, write_record
from ease.storage import write_json
from ease.studies.records import TrialRecord

BLOCK = {
    "block": "image.tower.blocks.2.attention.q",
    "forget_directions": 2,
    "retain_directions": 3,
    "excised": 1,
    "cosines": [0.6, 0.2],
    "energies": [0.3, 0.7],
    "forget_energy": 0.5,
    "retain_damage": 0.1,
}


NOTES = {"reference": "trained", "delta": 0.3}


def answer(**changes: Any) -> AnswerRecord:
    rounds = [RoundRecord.of(0, "decomposition", None, {}, NOTES | {"blocks": [BLOCK]})]
    rounds += [RoundRecord.of(1, "recovery", 0.5, {"forget/recall@1": 20.0}, {"rejected": [2]})]
    fields: dict[str, Any] = {
        "request": ClientRequest(clients=(1,)),
        "method": {"method": "ease_paper", "delta": 0.3},
        "trained_sha256": "ab",
        "seed": 0,
        "resumed": False,
        "rounds": tuple(rounds),
        "metrics": {"forget/recall@1": 20.0},
    }
    return AnswerRecord(**fields | changes)


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_record(tmp_path / "record.json", answer())
    assert read_record(AnswerRecord, tmp_path / "record.json") == answer()
    assert json.loads((tmp_path / "record.json").read_text())["format"] == 2


def test_a_spectrum_and_a_contribution_are_separated_from_other_notes() -> None:
    """Notes of `ease_paper` and of `ease` have their models. Other notes stay as they are, also beside them."""
    first, second = answer().rounds
    assert first.spectrum is not None and first.spectrum.delta == 0.3 and first.notes == {}
    assert first.spectrum.blocks[0].cosines == (0.6, 0.2) and first.spectrum.blocks[0].short_name == "image.2.q"
    assert second.spectrum is None and second.notes == {"rejected": [2]} and second.contribution is None
    both = RoundRecord.of(0, "x", None, {}, NOTES | {"blocks": [], "rejected": [1]})
    assert both.spectrum is not None and both.notes == {"rejected": [1]} and answer().contribution is None
    found = RoundRecord.of(0, "x", None, {}, {"share": 0.77, "replayed_rounds": 6, "rejected": [1]})
    assert found.contribution == ContributionNotes(share=0.77, replayed_rounds=6, replaying_clients=0)
    assert found.spectrum is None and found.notes == {"rejected": [1]}
    assert answer(rounds=(found,)).contribution == found.contribution


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": 1}, "format: 1, and this version reads 2"),
        ({"format": None}, "format: None, and this version reads 2"),
        ({"rounds": []}, "rounds: "),
        ({"request": {"scope": "client", "clients": 3}}, "request.client.clients: "),
        ({"request": {"scope": "planet"}}, "request: "),
        ({"method": {}}, "method: the method has no name"),
        ({"metrics": {"a": "b"}}, "metrics.a: "),
        ({"seed": None}, "seed: "),
        ({"more": 1}, "more: unknown key"),
    ],
)
def test_a_damaged_record_is_named_with_its_field_and_the_remedy(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    path = tmp_path / "record.json"
    write_json(path, answer().model_dump(mode="json") | change)
    with pytest.raises(UserError) as raised:
        read_record(AnswerRecord, path)
    text = str(raised.value)
    assert text.startswith(f"{path}: {said}") and text.endswith("; delete its folder and run `ease forget` again")
    assert "\n" not in text


def test_a_file_without_a_format_is_of_another_version(tmp_path: Path) -> None:
    stored = answer().model_dump(mode="json")
    del stored["format"]
    write_json(tmp_path / "record.json", stored)
    with pytest.raises(UserError, match=r"record\.json: format: none, and this version reads 2; delete"):
        read_record(AnswerRecord, tmp_path / "record.json")


@pytest.mark.parametrize(
    ("content", "said"), [("{", "damaged JSON"), ("[1]", "damaged, or written by an earlier version: it has no seal")]
)
def test_a_value_that_is_not_an_object_is_damaged(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "trial.json").write_text(content)
    with pytest.raises(UserError, match=rf"trial\.json: {said}.*run"):
        read_record(TrialRecord, tmp_path / "trial.json")


def test_as_many_energies_as_cosines(tmp_path: Path) -> None:
    stored = answer().model_dump(mode="json")
    stored["rounds"][0]["spectrum"]["blocks"][0]["energies"] = [1.0]
    write_json(tmp_path / "record.json", stored)
    with pytest.raises(UserError, match=r"rounds\.0\.spectrum\.blocks\.0: 2 cosines and 1 energies"):
        read_record(AnswerRecord, tmp_path / "record.json")


def test_a_price_against_zero_has_no_share() -> None:
    assert Price.of(3.0, 4.0).ratio == 0.75 and Price.of(3.0, 0.0).ratio == 0.0
