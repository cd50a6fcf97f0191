"""The forms in which a model is deployed, ONNX and int8, compared with the float model: whether forget pairs are
recognised again.

Coarser weights can undo small changes, and unlearning is a small change. So forget and unseen pairs are scored by every
form, and what counts is how much more the forget pairs gained than the unseen ones.
"""

import logging
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import computed_field
from scipy.special import logsumexp
from scipy.stats import norm

from ease.audit.membership import Estimate, auc
from ease.audit.verdict import WithComputedFields
from ease.config import Config
from ease.errors import UserError
from ease.requests.request import Request, forget_mask
from ease.runs.answers import StoredAnswer, find_answer, open_world
from ease.runs.export import write_onnx
from ease.runs.records import Record, write_record
from ease.runs.run import Run
from ease.runs.using import Source, encode_image, encode_text
from ease.runs.world import World

CONFIDENCE = 0.98
"""Confidence of the interval of what is recognised again."""
FEWEST = 8
"""Pairs of each kind, below which nothing can be measured."""
AT_ONCE = 64
RULE = "memories returned if forget pairs gained more than unseen ones and the 98 % interval excludes 0"
Form = Literal["float", "onnx", "int8"]
Embed = Callable[[np.ndarray, list[str]], tuple[np.ndarray, np.ndarray]]
"""Pixels and captions -> unit-norm embeddings of both."""


class DeployedForm(Config):
    """What one form of the model scores."""

    form: Form
    forget: float
    """Mean log-odds of a forget pair's own caption among the captions of all pairs that are compared."""
    unseen: float
    """The same of unseen pairs."""
    auc: Estimate
    """Chance that a forget pair scores above an unseen one, with its 95 % interval."""
    came_back: Estimate
    """How much more the forget pairs gained over the float model than the unseen ones, with its 98 % interval."""
    largest_change: float
    """Largest change of the cosine of a pair, against the float model."""


class DeployedAudit(Record, WithComputedFields):
    """`deployed.json` beside an answer."""

    format: Literal[1] = 1
    request: Request
    model_sha256: str
    forget_pairs: int
    unseen_pairs: int
    forms: tuple[DeployedForm, ...]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def found(self) -> tuple[Form, ...]:
        """Forms in which forget pairs gained more than unseen ones."""
        return tuple(each.form for each in self.forms if each.came_back.low > 0)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def words(self) -> str:
        """The finding in one line."""
        said = f"memories returned in: {', '.join(self.found)}" if self.found else "memories return in no form"
        return f"{said} ({self.forget_pairs} forget pairs against {self.unseen_pairs} unseen ones; {RULE})"


def deployed_path(stored: StoredAnswer) -> Path:
    return stored.folder / "deployed.json"


def audit_deployed(run: Run, name: str) -> DeployedAudit:
    """Score forget and unseen pairs by the float model of an answer and by its ONNX and int8 forms."""
    if run.config.partition.on_site:
        raise UserError("--deployed: pairs stay at their sites, so their scores cannot be measured here")
    if any(find_spec(each) is None for each in ("onnxscript", "onnxruntime")):
        raise UserError('--deployed needs the onnx extra: pip install "ease-unlearning[onnx]"')
    stored, request, _ = find_answer(run, name)
    world = open_world(run, request)
    source = Source.of(run, name)
    forget, unseen = compared_places(world, request)
    pairs = world.evaluator.pairs
    places = np.concatenate([forget, unseen])
    pixels, captions = np.asarray(pairs.pixels[places]), [pairs.captions[place][0] for place in places]
    temperature = run.config.model.temperature
    with tempfile.TemporaryDirectory(prefix="ease-deployed-") as folder:
        write_onnx(source, Path(folder))
        quantise(Path(folder))
        forms: dict[Form, Embed] = {
            "float": lambda pixels, captions: (
                encode_image(source, list(pixels)).numpy(),
                encode_text(source, captions).numpy(),
            ),
            "onnx": sessions(source, Path(folder), ""),
            "int8": sessions(source, Path(folder), "-int8"),
        }
        cosines = {form: np.matmul(*_sides(embed(pixels, captions))) for form, embed in forms.items()}
    found = DeployedAudit(
        request=request,
        model_sha256=stored.model_sha256,
        forget_pairs=len(forget),
        unseen_pairs=len(unseen),
        forms=compare_forms(cosines, len(forget), temperature),
    )
    with run.locked():
        write_record(deployed_path(stored), found)
    return found


def compared_places(world: World, request: Request) -> tuple[np.ndarray, np.ndarray]:
    """Places of the forget pairs, and of pairs that no training has seen."""
    seen = world.evaluator
    named = [np.asarray(seen.data(shard.train))[forget_mask(request, shard)] for shard in world.shards]
    held = [np.asarray(seen.data(shard.validation)) for shard in world.shards]
    forget, unseen = np.concatenate(named), np.concatenate([*held, np.asarray(seen.test)])
    if min(len(forget), len(unseen)) < FEWEST:
        raise UserError(
            f"--deployed: {len(forget)} forget and {len(unseen)} unseen pairs; at least {FEWEST} of each are compared"
        )
    return forget, unseen


def _sides(embedded: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    image, text = embedded
    return image, text.T


def quantise(folder: Path) -> None:
    """Write an int8 form of both encoders beside them."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    for modality in ("image", "text"):
        graph = onnx.load(folder / f"{modality}.onnx")
        del graph.graph.value_info[:]  # shapes that the exporter noted contradict those inferred after its own passes
        logging.disable(logging.WARNING)  # it recommends a preparation that only matters for convolutions
        try:
            quantize_dynamic(graph, folder / f"{modality}-int8.onnx", weight_type=QuantType.QInt8)
        finally:
            logging.disable(logging.NOTSET)


def sessions(source: Source, folder: Path, suffix: str) -> Embed:
    """Run both encoders of an export."""
    from onnxruntime import InferenceSession

    image, text = (InferenceSession(str(folder / f"{modality}{suffix}.onnx")) for modality in ("image", "text"))

    def run(session: Any, name: str, given: np.ndarray) -> np.ndarray:
        parts = [given[start : start + AT_ONCE] for start in range(0, len(given), AT_ONCE)]
        return np.concatenate([session.run(None, {name: part})[0] for part in parts])

    def embed(pixels: np.ndarray, captions: list[str]) -> tuple[np.ndarray, np.ndarray]:
        return run(image, "pixels", pixels), run(text, "tokens", source.backbone.tokenize(captions).numpy())

    return embed


def compare_forms(cosines: dict[Form, np.ndarray], forget: int, temperature: float) -> tuple[DeployedForm, ...]:
    """Compare forms by the cosines of all pictures with all captions; the first `forget` pairs are forget pairs."""
    base, made = cosines["float"], []
    first = log_odds(base, temperature)
    for form, found in cosines.items():
        scores = log_odds(found, temperature)
        made.append(
            DeployedForm(
                form=form,
                forget=float(scores[:forget].mean()),
                unseen=float(scores[forget:].mean()),
                auc=auc(scores[:forget], scores[forget:]),
                came_back=_difference((scores - first)[:forget], (scores - first)[forget:]),
                largest_change=float(np.abs(np.diag(found) - np.diag(base)).max()),
            )
        )
    return tuple(made)


def log_odds(cosines: np.ndarray, temperature: float) -> np.ndarray:
    """How likely each picture's own caption is against all other captions, as log-odds."""
    logits = cosines.astype(np.float64) / temperature
    others = np.where(np.eye(len(logits), dtype=bool), -np.inf, logits)
    odds: np.ndarray = np.diag(logits) - logsumexp(others, axis=1)
    return odds


def _difference(first: np.ndarray, second: np.ndarray) -> Estimate:
    """Difference of two means with its interval (Welch)."""
    value = float(first.mean() - second.mean())
    error = float(np.sqrt(first.var(ddof=1) / len(first) + second.var(ddof=1) / len(second)))
    reach = float(norm.ppf((1 + CONFIDENCE) / 2)) * error
    return Estimate(value, value - reach, value + reach)
