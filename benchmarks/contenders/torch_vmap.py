"""One model for each client in a stack, trained by torch.func: vmap over the gradient of one client's loss.

python torch_vmap.py FOLDER THREADS
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from stacked import Stack, stacks
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from work import Projectors, Weights, Work, serve


def rounds(work: Work, plan: list[Stack], model: Projectors) -> Iterator[Weights]:
    def loss(weights: Weights, image: torch.Tensor, text: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        picture = functional_call(model, weights, (image,), {"side": "image"})
        words = functional_call(model, weights, (text,), {"side": "text"})
        logits = picture @ words.T / work.temperature
        outside = torch.where(real, 0.0, -1e30)
        to_text = torch.logsumexp(logits + outside, dim=1)
        to_image = torch.logsumexp(logits.T + outside, dim=1)
        each = (to_text + to_image) / 2 - logits.diagonal()
        return torch.where(real, each, 0.0).sum() / real.sum().clamp_min(1)

    gradient = vmap(grad(loss))
    shares = torch.tensor(work.pairs) / sum(work.pairs)
    state = dict(work.start)
    for stack in plan:
        rows, lines = (torch.from_numpy(each) for each in (stack.rows, stack.lines))
        real = torch.from_numpy(stack.real)
        weights = {name: tensor.expand(len(shares), *tensor.shape).clone() for name, tensor in state.items()}
        for step in range(rows.shape[1]):
            found = gradient(weights, work.image[rows[:, step]], work.text[lines[:, step]], real[:, step])
            for name, change in found.items():
                weights[name].sub_(change, alpha=work.rate)
        state = {name: torch.tensordot(shares, tensor, dims=1) for name, tensor in weights.items()}
        yield state


class OneSide(torch.nn.Module):
    """The projectors, called by side."""

    def __init__(self, model: Projectors):
        super().__init__()
        self.image, self.text = model.image, model.text

    def forward(self, x: torch.Tensor, side: str) -> torch.Tensor:
        branch = self.image if side == "image" else self.text
        # vmap knows no in-place normalisation with eps clamps: the same arithmetic, spelled out.
        hidden = F.gelu(branch.projector[0](F.layer_norm(x, x.shape[-1:])))
        out = branch.projector[1](hidden)
        return out / out.norm(dim=-1, keepdim=True).clamp_min(1e-6)


def main() -> None:
    folder, threads = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(threads)
    work = Work.load(folder / "work.npz")
    plan, model = stacks(work), OneSide(work.model())
    serve(folder, "torch_vmap", lambda: rounds(work, plan, model))


if __name__ == "__main__":
    main()
