"""The model card of an export, in the format that Hugging Face reads."""

from ease.audit.records import current_audit
from ease.requests.request import ClassRequest, ClientRequest, Request
from ease.runs.answers import StoredAnswer, find_answer
from ease.runs.run import Run

FRONT = """---
license: other
library_name: ease
pipeline_tag: zero-shot-image-classification
tags: [federated-learning, machine-unlearning, image-text-retrieval]
---
"""
LIMITS = """## Limits

- The model retrieves images by text and text by images. It was evaluated by recall on test pairs of its own data only.
- Recall shows what was learnt. It says nothing about bias, fairness or fitness for a purpose.
- "Unlearned" means evidence of approximate erasure, measured against retraining, unless the verdict says identical.
- Requests that are answered after this export do not change this copy. Delete it when a newer one replaces it.

## Licence

The licence depends on the data and on the weights of the backbone. Fill it in before you publish the model.
"""


def model_card(run: Run, request: str | None) -> str:
    """Data, clients, answered requests with their verdicts, and limits. It contains no ids and no names."""
    return "\n".join([FRONT, _title(request), _data(run), _requests(run, request), LIMITS])


def _title(request: str | None) -> str:
    state = "as the run's current model" if request is None else "after one more request was answered"
    return f"# Image-text model, {state}\n"


def _data(run: Run) -> str:
    config, known = run.config, run.known()
    clients = () if known is None else known[0].clients
    rows = [
        ("data", config.data.name),
        ("backbone", f"{config.model.backbone}, frozen"),
        ("trained parts", f"projector: {config.model.projector}, LoRA: {config.model.lora}"),
        ("training", f"{config.training.rounds} rounds over {len(clients)} clients"),
        ("training pairs", f"{sum(len(each.train_ids) for each in clients):,}"),
    ]
    return "\n".join(["## Training", "", "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows), ""])


def _requests(run: Run, request: str | None) -> str:
    """One line per released request and, if this is not the released model, one for the request of this model."""
    released = [(each.request, each.answer) for each in run.head.releases]
    if request is not None:
        stored, asked, _ = find_answer(run, request)
        if asked not in [each for each, _ in released]:
            released.append((asked, f"{stored.folder.parent.name}/{stored.folder.name}"))
    lines = [
        f"| {number} | {_kind(asked)} | {_verdict(run, name)} |" for number, (asked, name) in enumerate(released, 1)
    ]
    table = ["| | forgotten | verdict |", "|---|---|---|", *lines] if lines else ["None."]
    return "\n".join(["## Answered erasure requests", "", *table, ""])


def _kind(asked: Request) -> str:
    if isinstance(asked, ClientRequest):
        return f"{len(asked.clients)} client(s)"
    return "a class of pairs" if isinstance(asked, ClassRequest) else "single pairs"


def _verdict(run: Run, name: str) -> str:
    stored = StoredAnswer(run.folder / "requests" / name)
    audit = current_audit(stored) if stored.done else None
    return "not audited" if audit is None else audit.verdict.words
