"""A model card names data, requests and verdicts, and no pair and no person."""

from pathlib import Path

from ease.commands.export import export_run
from ease.runs.answers import finished_answers
from ease.runs.run import Run
from ease.show.model_card import model_card


def test_a_card_lists_training_and_requests(one_forgotten: Path) -> None:
    run = Run.load(one_forgotten)
    card = model_card(run, finished_answers(run)[0])
    assert card.startswith("---\nlicense: other\n") and card.count("\n---\n") == 1
    known = run.known()
    assert known is not None
    pairs = sum(len(each.train_ids) for each in known[0].clients)
    assert f"| training pairs | {pairs:,} |" in card
    assert "| 1 | 1 client(s) | not audited |" in card
    assert not [each.train_ids[0] for each in known[0].clients if each.train_ids[0] in card]


def test_the_trained_model_has_no_requests(one_forgotten: Path) -> None:
    assert "## Answered erasure requests\n\nNone.\n" in model_card(Run.load(one_forgotten), None)


def test_an_export_begins_with_its_card(one_forgotten: Path, tmp_path: Path) -> None:
    done = export_run(one_forgotten, None, "safetensors", tmp_path / "out", quiet=True)
    text = (done.folder / "README.md").read_text()
    assert text.startswith("---\n") and "## Limits" in text and "python load.py" in text
