"""Caveats of an audit, in sentences."""

from collections.abc import Iterator, Sequence

from ease.audit.band import reach
from ease.audit.membership import CONFIDENCE, EXPECTED_FALSE_POSITIVES
from ease.audit.subjects import Candidates
from ease.audit.verdict import Measure
from ease.methods.base import Unlearner

NOT_TESTED = (
    "membership in the backbone's own pretraining",
    "attacks that read gradients or weights, or that reconstruct pictures or captions",
    "worst-case pairs, except canaries if some were planted (data.canaries)",
    "other training seeds: one trained model is audited, not the method in general",
    "shadow attacks on retained pairs: they are members of every shadow",
)
NO_ATTACKS = "membership attacks by shadows: they compare more pairs than this request offers"
LEAST_GAP = 0.1
"""Mean difference of log-odds below which the trained model holds the forget pairs as a retrained one does."""


def sample_caveat(candidates: Candidates) -> str:
    return (
        f"{candidates.members} members and {candidates.others} non-members; their class mixes differ by "
        f"{candidates.mismatch:.2f} (total variation)"
    )


def band_caveat(retrained: int, measures: Sequence[Measure]) -> str:
    """A note on how many measures leave their bands by chance."""
    return (
        f"band: 95 % prediction interval from {retrained} retrained models of one seed, which reaches "
        f"{reach(retrained):.1f} of their standard deviations to either side; of {len(measures)} measures a retrained "
        f"model itself falls outside on about {(1 - CONFIDENCE) * len(measures):.0f}: they explain and do not vote"
    )


def settings_caveat(method: Unlearner) -> str:
    """A note if the method's settings are not its defaults."""
    usual = type(method)().model_dump(mode="json")
    changed = [f"{key} = {value}" for key, value in method.model_dump(mode="json").items() if value != usual[key]]
    return (
        f"{method.name} with {', '.join(changed) or 'its default settings'}: not a fair test if chosen by "
        "these measures or against retrain, nor beside a method that was tuned less"
    )


def exposure_caveat(in_training: float, by_answer: float, by_retrain: float) -> str:
    """A note on how often the models were shown retained pairs."""
    return (
        f"retained pairs shown in all: {in_training + by_answer:,.0f} to the answer ({in_training:,} in training), "
        f"{by_retrain:,.0f} to retrain; more showings alone raise the recall of retained pairs"
    )


def threshold_caveats(fpr: float, shadow_scores: int, others: int) -> Iterator[str]:
    """Notes on the threshold and whether it can be checked."""
    if shadow_scores * fpr < EXPECTED_FALSE_POSITIVES:
        needed = EXPECTED_FALSE_POSITIVES / fpr
        yield (
            f"TPR at {fpr:.2%} FPR is not given: it takes {needed:.0f} non-member scores "
            f"to set the threshold by, and the shadows give {shadow_scores}; use more shadows or a higher --fpr"
        )
    if others * fpr < EXPECTED_FALSE_POSITIVES:
        yield (
            f"the threshold comes from {shadow_scores} non-members of the shadows; on the audited model itself only "
            f"{others} non-members can check it"
        )


def pair_caveats(copies: int, gap: float, unscored: int) -> Iterator[str]:
    """Notes on duplicates, forget pairs without a trace, and pairs that no attack can score."""
    if copies:
        yield f"{copies} retained pairs are near-duplicates of forget pairs: no method can forget what is kept"
    if gap < LEAST_GAP:
        yield f"no signal: the trained model holds the forget pairs as retrain does (log-odds differ by {gap:.2f})"
    if unscored:
        yield f"{unscored} pairs have no shadow on one side and are left out"
