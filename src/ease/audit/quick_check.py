"""The quick check of a result: how strongly it remembers the forget pairs, by scores that clients measure.

No model is trained and no pair leaves its client. It is not a verdict, because it looks at one statistic only. The
comparison is fair only if held-out pairs differ from the forget pairs in nothing but membership. So pairs that words
found are compared with held-out pairs that the same words fit, and pairs of another kind than what their clients hold
out are not compared at all.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import computed_field
from scipy.special import stdtrit

from ease.audit.membership import Estimate
from ease.audit.membership_scores import FEWEST, Scores, adjusted_gap, comparable, measure_scores
from ease.audit.verdict import WithComputedFields
from ease.config import Config
from ease.data.partition import joint_embedding
from ease.errors import UserError
from ease.federation.middleware import Guarded
from ease.methods.base import Trained, Unlearner, forget_clients
from ease.requests.request import ClassRequest, Request, SampleRequest, forget_mask
from ease.runs.answers import StoredAnswer, find_answer, trained_of
from ease.runs.concepts import held_out_matches
from ease.runs.records import MethodRecord, read_record, write_record
from ease.runs.run import Run
from ease.runs.world import World
from ease.seeding import generator
from ease.storage import remove_leftovers

CONFIDENCE = 0.98
"""Confidence of the gap's interval. With 95 % retrained models were suspected in 19 of 286 looks, which may be chance
or more than one of twenty; the wider interval is on the safe side."""
RULE = (
    "something is found where the 98 % interval of the gap to own held-out pairs excludes 0, on either side; by chance "
    "that happens in less than one of twenty looks"
)
OF_ANOTHER_KIND = 0.05
"""A list is taken to be chosen by content if a random list would look as unusual in fewer cases than this."""
DRAWS = 499
"""Random lists that a list is compared with."""
SAME_CLIENTS = "held-out pairs of the same clients"
NO_VERDICT = "This is not a verdict. `ease audit` without --quick gives one"


class Level(Config):
    """Mean log-odds of forget pairs and similar held-out pairs under one model."""

    forget: float
    held_out: float
    """Level of unseen pairs that resemble them."""
    expected: float
    """Level at which retraining is expected to leave the forget pairs.

    To a retrained model they are pairs like the held-out ones: neither was trained on. Those that were easier at the
    start of training, when nobody was a member, stay easier. So this is the level of held-out pairs of the same client
    that stood at the start where the forget pairs did: a line is fitted through both, and the gap is what is left.
    """
    gap: Estimate
    """Forget pairs above where they are expected, with its 98 % interval."""


class QuickCheck(MethodRecord, WithComputedFields):
    """The record of a quick check, `quick.json` beside the result."""

    remedy: ClassVar[str] = "delete it and run `ease audit --quick` again"
    format: Literal[2] = 2
    request: Request
    model_sha256: str
    """Hash of the checked model."""
    forget_pairs: int
    held_out_pairs: int
    """Held-out pairs of the clients that hold forget pairs. A leaving client is compared with its own held-out pairs,
    because those of other clients resemble retained pairs and have higher scores after retraining too."""
    compared_with: str
    """Which held-out pairs."""
    before: Level
    """Under the model that was to forget."""
    after: Level

    @computed_field  # type: ignore[prop-decorator]
    @property
    def found(self) -> bool:
        """Whether forget pairs are distinguishable from unseen ones; over-forgetting is detectable as well."""
        return not self.after.gap.contains(0)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def words(self) -> str:
        """The finding in one line."""
        gap = self.after.gap
        if not self.found:
            said = "Nothing found: forget pairs differ by"
        else:
            said = f"Found: forget pairs are memorised {'more' if gap.value > 0 else 'less'} than unseen ones, by"
        return (
            f"{said} {_signed(gap)} from held-out pairs like them, and {_signed(self.before.gap)} before; "
            f"{self.forget_pairs} pairs against {self.held_out_pairs} {self.compared_with}"
        )

    @property
    def limits(self) -> tuple[str, ...]:
        """Caveats."""
        nothing_before = self.before.gap.low <= 0
        return (
            *(["Nothing was found before unlearning either: this check is blind here"] if nothing_before else []),
            NO_VERDICT,
        )


def _signed(gap: Estimate) -> str:
    return f"{gap.value:+.2f} [{gap.low:+.2f}, {gap.high:+.2f}]"


def quick_check(run: Run, world: World, name: str) -> QuickCheck:
    """Check the finished result `REQUEST` or `REQUEST/METHOD`."""
    return check_answer(run, world, *find_answer(run, name))


def check_answer(
    run: Run,
    world: World,
    stored: StoredAnswer,
    request: Request,
    method: Unlearner,
    trained: Trained | None = None,
) -> QuickCheck:
    """Check a result and store the record; a stored record of the same model is returned."""
    answer = stored.model()
    found = current_check(stored)
    if found is not None:
        return found
    matches = held_out_like(world, request)
    trained = trained or trained_of(run, request)
    sound = Guarded(run.hosted(world).federation, world.config.training)
    start, before, after = (
        only(measure_scores(trained, state, request, sound, forget_clients(request, sound)), matches)
        for state in (trained.initial, trained.start, answer)
    )
    concerned = {client: values for client, values in start.items() if len(values["forget"])}
    first, last = (compare(scores, concerned) for scores in (before, after))
    found = QuickCheck(
        request=request,
        method=method.model_dump(mode="json"),
        model_sha256=stored.model_sha256,
        forget_pairs=sum(len(values["forget"]) for values in concerned.values()),
        held_out_pairs=sum(len(values["held_out"]) for values in concerned.values()),
        compared_with=compared_with(request, matches),
        before=first,
        after=last,
    )
    with run.locked():
        remove_leftovers(stored.folder)  # of a process killed while it wrote what it had found
        write_record(stored.quick_path, found)
    return found


def current_check(stored: StoredAnswer) -> QuickCheck | None:
    """The stored check of the same model, or None."""
    if not stored.quick_path.is_file():
        return None
    found = read_record(QuickCheck, stored.quick_path)
    return found if found.model_sha256 == stored.model_sha256 else None


Matches = Mapping[int, np.ndarray]
"""Client -> which of its held-out pairs resemble the forget pairs: bool [held-out pairs]."""


def held_out_like(world: World, request: Request) -> Matches | None:
    """The held-out pairs that a request would have named; None: all that clients report resemble the forget pairs.

    A request that names clients or classes is compared with the held-out pairs of those. A list is compared with all
    held-out pairs of its clients, so it must look like a random one.
    """
    if not isinstance(request, SampleRequest):
        return None
    by_rule = bool(request.words or request.clients or request.classes) and not request.singles
    if world.config.partition.on_site:
        if by_rule:
            raise UserError(
                "no quick check: only the sites know which held-out pairs the words fit, and other pairs have other "
                "levels without having been forgotten; run `ease audit` instead"
            )
        return None
    mine = [shard.train[forget_mask(request, shard)] for shard in world.shards]
    if np.isin(np.concatenate(mine), world.evaluator.canaries).any():
        raise UserError("no quick check: held-out pairs are not mismatched as canaries are; run `ease audit` instead")
    if by_rule:
        return held_out_matches(world, request)
    chance = chance_of_list(world, request)
    if chance < OF_ANOTHER_KIND:
        raise UserError(
            f"no quick check: the listed pairs differ from those that their clients hold out (p = {chance:.2g}), "
            "so that retraining would not leave both at one level; name them by --concept or run `ease audit` instead"
        )
    return None


def chance_of_list(world: World, request: Request) -> float:
    """How often a random list of as many pairs of each client has a mean as far from the rest in the frozen space."""
    activations, rng = world.evaluator.activations, generator(world.config.seed, "list of pairs")
    width = activations.pooled_image.shape[-1] + activations.pooled_text.shape[-1]
    total = np.zeros((1 + DRAWS, width))
    for shard in world.shards:
        mask = forget_mask(request, shard)
        if not mask.any() or mask.all():
            continue
        points = joint_embedding(activations.pooled_image[shard.train], activations.pooled_text[shard.train])
        centred = points - points.mean(axis=0)
        total[0] += centred[mask].sum(axis=0)
        for draw in range(1, 1 + DRAWS):
            total[draw] += centred[rng.choice(len(mask), int(mask.sum()), replace=False)].sum(axis=0)
    far = (total**2).sum(axis=1)
    return float((far[1:] >= far[0] - 1e-12).sum() + 1) / (1 + DRAWS)


def only(scores: Scores, matches: Matches | None) -> Scores:
    """The scores with only the matching held-out pairs."""
    if matches is None:
        return scores
    return {
        client: {**values, "held_out": values["held_out"][torch.from_numpy(matches[client])]}
        for client, values in scores.items()
    }


def compared_with(request: Request, matches: Matches | None) -> str:
    """Which held-out pairs the forget pairs are compared with, in words."""
    if matches is not None:
        return f"{SAME_CLIENTS} that the request would have named"
    return f"{SAME_CLIENTS} and classes" if isinstance(request, ClassRequest) else SAME_CLIENTS


def compare(scores: Scores, start: Scores) -> Level:
    """Forget pairs and held-out pairs of the same clients, given their scores when nobody was a member.

    Each client scores against its own pairs, so scores are only comparable within a client.
    """
    scores, start = comparable(scores, start)
    if not scores:
        raise UserError("no client holds a forget pair any more, so that nothing can be looked at")
    clients = torch.cat([torch.full((sum(map(len, of.values())),), client) for client, of in scores.items()])
    level, early = (
        torch.cat([torch.cat([of["forget"], of["held_out"]]) for of in each.values()]) for each in (scores, start)
    )
    member = torch.cat(
        [torch.arange(len(of["forget"]) + len(of["held_out"])) < len(of["forget"]) for of in scores.values()]
    )
    forget, held_out = int(member.sum()), int((~member).sum())
    if min(forget, held_out) < FEWEST:
        raise UserError(
            f"{forget} forget pairs and {held_out} held-out pairs like them at the same clients, and a quick check "
            f"compares {FEWEST} at least on either side; a larger partition.validation_share holds out more"
        )
    named = clients.unique()[1:]
    covariates = [early.double(), *((clients == client).double() for client in named)]
    gap, error = adjusted_gap(level.double(), member.double(), covariates)
    used, count = 2 + len(covariates), len(level)
    # The spread is estimated from what is left after so many fits, and from the smaller side above all.
    error *= (count / max(count - used, 1)) ** 0.5
    reach = float(stdtrit(max(min(forget, held_out) - 1, 1), (1 + CONFIDENCE) / 2)) * error
    stand, beside = float(level[member].mean()), float(level[~member].mean())
    return Level(forget=stand, held_out=beside, expected=stand - gap, gap=Estimate(gap, gap - reach, gap + reach))
