"""Rounds in which clients forget and keep at once, as several methods do that were made for one site."""

from collections.abc import Iterator
from dataclasses import replace

from ease.federation.fedavg import average, participants
from ease.federation.protocol import Federation, LocalJob
from ease.methods.base import Step, Trained, retained_clients, step_of
from ease.requests.request import ClientRequest, Request


def joint_rounds(
    trained: Trained, request: Request, federation: Federation, job: LocalJob, rounds: int, forget_rounds: int
) -> Iterator[Step]:
    """FedAvg from the trained state under a job that looks at forget and retained pairs together.

    A client that withdraws has only its forget pairs. Other clients would outvote it in a mean, so its change
    is added whole. It leaves after `forget_rounds`.
    """
    state, training = trained.start, trained.training
    leaving = sorted(request.clients) if isinstance(request, ClientRequest) else []
    for number in range(1, rounds + 1):
        job = replace(job, round=number)
        drawn = participants(retained_clients(request, federation), training, trained.seed, number)
        finished = average(state, federation.run(state, job, drawn), training, number, clip=False)
        withdrawing = leaving and number <= forget_rounds
        if withdrawing:
            departed = average(state, federation.run(state, job, leaving), training, number, clip=False)
            both = finished.state + (departed.state - state)
            finished = replace(finished, state=both, rejected=finished.rejected | departed.rejected)
        state = finished.state
        yield step_of(finished, "finetune" if leaving and not withdrawing else "unlearning")
