"""NoT: which layers may be negated, and that it matters which."""

import pytest
import torch

from ease.errors import UserError
from ease.methods import make_method
from ease.methods.not_ import negate
from ease.params import Params
from ease.requests.request import ClientRequest
from ease.runs.world import World

CLIENT = ClientRequest(clients=(1,))
FIRST = [f"{side}.projector.0.{part}" for side in ("image", "text") for part in ("bias", "weight")]
LAST = [f"{side}.projector.1.{part}" for side in ("image", "text") for part in ("bias", "weight")]


def similarities(world: World, state: Params, client: int = 0) -> torch.Tensor:
    """Cosines of all images of a client with all their first captions [pairs, pairs]."""
    data = world.federation.data[client].train
    mask = None if data.text_mask is None else data.text_mask[:, 0]
    with torch.no_grad():
        image = world.server.model.embed(state.tensors, "image", data.image)
        text = world.server.model.embed(state.tensors, "text", data.text[:, 0], mask)
    return image @ text.T


@pytest.fixture(scope="module")
def full(small_config, shared_cache) -> tuple[World, Params]:
    """A world that trains both LoRA factors, and a state in which none of them is zero."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EASE_CACHE", str(shared_cache))
        world = World.open(small_config("model.lora=full"))
    rng = torch.Generator().manual_seed(0)
    return world, world.server.initial().map(lambda tensor: tensor + 0.3 * torch.randn(tensor.shape, generator=rng))


def test_the_first_projector_layers_are_negated_and_nothing_else(learnt) -> None:
    final = learnt.trained.final
    first = next(make_method("not").unlearn(learnt.trained, CLIENT, learnt.world.federation))
    assert first.phase == "negation" and first.notes == {"negated": FIRST}
    for name, tensor in first.state.tensors.items():
        assert torch.equal(tensor, -final[name] if name in FIRST else final[name])
        assert name not in FIRST or float(tensor.abs().max()) > 0


def test_the_default_really_changes_the_embeddings(learnt) -> None:
    """The sheet of similarities has next to nothing to do with the one before; the right captions are lost."""
    before = similarities(learnt.world, learnt.trained.final)
    after = similarities(learnt.world, negate(learnt.trained.final, FIRST))
    correlation = torch.corrcoef(torch.stack([before.flatten(), after.flatten()]))[0, 1]
    assert abs(float(correlation)) < 0.5
    right = [float((each.argmax(1) == torch.arange(len(each))).float().mean()) for each in (before, after)]
    assert right[1] < 0.5 * right[0]


def test_the_refused_layers_would_change_nothing_or_turn_all_around(full) -> None:
    """Unit-norm embeddings change sign with the last layer: in both modalities the signs cancel. So do two factors'."""
    world, state = full
    before = similarities(world, state)
    torch.testing.assert_close(similarities(world, negate(state, LAST)), before)
    torch.testing.assert_close(similarities(world, negate(state, LAST[:2])), -before)
    factors = [name for block in state.blocks if block.factored for name in block.tensors]
    assert factors
    torch.testing.assert_close(similarities(world, negate(state, factors)), before)
    one_of_two = similarities(world, negate(state, factors[:1]))
    assert float((one_of_two - before).abs().max()) > 1e-3


@pytest.mark.parametrize("names", [("image.projector.1", "text.projector.1"), ("text.projector.1.weight",)], ids=str)
def test_last_layers_are_refused(learnt, names: tuple[str, ...]) -> None:
    method = make_method("not", table={"layers": names})
    with pytest.raises(UserError, match=r"projector\.1 is a last layer"):
        next(method.unlearn(learnt.trained, CLIENT, learnt.world.federation))


def test_both_factors_are_refused_and_one_is_not(full) -> None:
    _, state = full
    block = next(block for block in state.blocks if block.factored)
    for names in ((block.name,), block.tensors):
        with pytest.raises(UserError, match="factors negated leave their product"):
            make_method("not", table={"layers": names})._tensors(state.blocks)
    assert make_method("not", table={"layers": block.tensors[:1]})._tensors(state.blocks) == [block.tensors[0]]


def test_an_unknown_layer_is_refused_with_what_there_is(learnt) -> None:
    with pytest.raises(UserError, match=r"image\.projector: .*its layers are: .*image\.projector\.0"):
        next(make_method("not", ("layers=['image.projector']",)).unlearn(learnt.trained, CLIENT, None))


def test_without_projectors_layers_must_be_named(full) -> None:
    """As with model.projector = "none"; a model with one projector has that one negated."""
    blocks = [block for block in full[0].server.initial().blocks if block.kind == "lora"]
    with pytest.raises(UserError, match=r"has no projector; name layers to negate, of: image\."):
        make_method("not")._tensors(blocks)
    factor = blocks[0].tensors[0]
    assert make_method("not", table={"layers": [factor]})._tensors(blocks) == [factor]
    one_side = [block for block in full[0].server.initial().blocks if block.kind == "lora" or block.modality == "text"]
    assert make_method("not")._tensors(one_side) == [name for name in FIRST if name.startswith("text")]
