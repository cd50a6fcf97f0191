"""Groups of local trainings that share passes, as large as memory and caches allow, in sequence or in threads."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from ease.data.examples import Examples
from ease.errors import UserError
from ease.federation.gram_layer import gram_sides
from ease.federation.projectors import projects_alone
from ease.federation.protocol import LocalJob
from ease.federation.stacked import LocalResult, LocalTraining, train_stacked
from ease.model.dual_encoder import DualEncoder

MOST_MODELS = {"cpu": 16, "cuda": 512}
"""Most models in one pass. More do not help, because the passes are busy already."""
CACHED_BYTES = 8 << 20
"""Bytes of stacked states in one pass on a CPU. More do not fit into its caches, and each step waits for memory."""


@dataclass
class GroupSize:
    """How many models share a pass. It shrinks when memory runs out, and stays so for the next rounds."""

    models: int

    @classmethod
    def on(cls, device: torch.device) -> "GroupSize":
        return cls(MOST_MODELS[device.type])

    def for_caches(
        self, trainings: Sequence[LocalTraining], device: torch.device, untouched: Collection[str]
    ) -> "GroupSize":
        """On a CPU, groups of equal size that fit into its caches; no step touches the `untouched` tensors."""
        if device.type != "cpu":
            return self
        touched = sum(tensor.nbytes for name, tensor in trainings[0].start.tensors.items() if name not in untouched)
        groups = -(-len(trainings) // max(1, min(self.models, CACHED_BYTES // touched)))
        if (threads := torch.get_num_threads()) > 1:
            groups = min(len(trainings), max(groups, 2 * threads))  # two for each: they are of unequal length
        return GroupSize(-(-len(trainings) // groups))


def train_all(
    model: DualEncoder, examples: Examples, trainings: Sequence[LocalTraining], job: LocalJob, group_size: GroupSize
) -> Iterable[LocalResult]:
    """The results of all trainings, made in groups that fit into memory and caches."""
    untouched = {f"{side}.projector.0.weight" for side in gram_sides(model, examples, job)}
    size = group_size.for_caches(trainings, examples.device, untouched)
    threaded = len(trainings) > size.models and _small_steps(model, examples, job)
    return (train_in_threads if threaded else train_in_groups)(model, examples, trainings, job, size)


def train_in_groups(
    model: DualEncoder, examples: Examples, trainings: Sequence[LocalTraining], job: LocalJob, group_size: GroupSize
) -> Iterator[LocalResult]:
    """The results of trainings in groups that keep the device busy; groups shrink when memory runs out.

    A single training that does not fit is tried again with checkpoints, which compute activations inside blocks twice.
    """
    done = 0
    while done < len(trainings):
        group = trainings[done : done + group_size.models]
        try:
            results = train_stacked(model, examples, group, job)
        except torch.OutOfMemoryError as error:
            if len(group) == 1 and not model.save_memory():
                raise UserError(
                    f"training.batch_size = {job.batch_size}: one client's batch does not fit into the memory of "
                    f"{examples.device}; choose a smaller one"
                ) from error
            results = []
        if not results:  # outside of the handler, which would keep the failed attempt's tensors alive
            group_size.models = (len(group) + 1) // 2
            torch.cuda.empty_cache()
        yield from results
        done += len(results)


def train_in_threads(
    model: DualEncoder, examples: Examples, trainings: Sequence[LocalTraining], job: LocalJob, group_size: GroupSize
) -> list[LocalResult]:
    """The results of trainings with small steps on a CPU, one group per thread at a time, the longest first.

    Threads that share a step wait for each other after every product, and most products are too small to share.
    Adapted towers take turns in the forward pass and run their backward passes concurrently.
    """
    order = sorted(range(len(trainings)), key=lambda place: len(trainings[place].draws), reverse=True)
    groups = [order[begin : begin + group_size.models] for begin in range(0, len(order), group_size.models)]
    results: dict[int, LocalResult] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(min(threads, len(groups))) as pool:
            done = pool.map(lambda group: train_stacked(model, examples, [trainings[i] for i in group], job), groups)
            for group, found in zip(groups, done, strict=True):
                results |= dict(zip(group, found, strict=True))
    finally:
        torch.set_num_threads(threads)
    return [results[place] for place in range(len(trainings))]


def _small_steps(model: DualEncoder, examples: Examples, job: LocalJob) -> bool:
    """Whether each thread of a CPU should make its own steps: for projectors, and if the caches suffice for all."""
    threads = torch.get_num_threads()
    if examples.device.type != "cpu" or threads == 1:
        return False
    if projects_alone(model):
        return True
    # Blocks that are computed again on the way back need their tensors then, and layers hold those of one thread only.
    return not model.config.checkpointing and threads * job.batch_size * examples.pair_bytes <= CACHED_BYTES
