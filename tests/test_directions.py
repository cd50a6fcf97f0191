"""The table of directions counts what a threshold takes, over the seeds of a data set."""

from pathlib import Path

from recipes.directions import cell, collect, table

from ease.methods.ease_paper import EasePaper
from ease.requests.request import ClassRequest, ClientRequest
from ease.runs.forget import forget
from ease.runs.records import BlockNotes
from ease.runs.run import Run
from ease.runs.world import World


def notes(*cosines: float) -> BlockNotes:
    return BlockNotes(
        block="image.projector.0",
        forget_directions=len(cosines),
        retain_directions=3,
        excised=0,
        cosines=cosines,
        energies=cosines,
        forget_energy=0.5,
        retain_damage=0.1,
    )


def test_a_cell_by_hand() -> None:
    """Up to 0.1: one and two directions, mean 1.5; up to 0.5: two and three; there are three and four."""
    assert cell([notes(0.05, 0.3, 0.7), notes(0.02, 0.1, 0.5, 0.9)], (0.1, 0.5)) == "0.02 to 0.90, 1.5 / 2.5 of 3.5"
    shown = table({("image.projector.0", "class"): [notes(0.25)]}, (0.3,)).splitlines()
    assert shown[0] == "| block | client: cosines, up to 0.3 | class: cosines, up to 0.3 | sample: cosines, up to 0.3 |"
    assert shown[2:] == ["| image.projector.0 |  | 0.25 to 0.25, 1 of 1 |  |"]


def test_the_answers_of_a_run_are_counted_once(world: World, tmp_path: Path) -> None:
    """Variants that decompose alike count once, other probes and readings not at all."""
    run = Run.create(tmp_path / "runs" / "one", world.config)
    list(run.train(world))
    client, pairs = ClientRequest(clients=(1,)), ClassRequest(classes=(1,))
    repaired = EasePaper(reference="initial")
    for request, method in (
        (client, EasePaper()),
        (client, repaired),
        (client, EasePaper(reference="initial", alpha=0.0)),
        (pairs, EasePaper(reference="initial", probe_round=1)),
        (pairs, repaired),
    ):
        list(forget(run, world, request, method, observe=False))
    ((name, (seeds, found)),) = collect(tmp_path, probe=1).items()
    assert name == "scenes" and seeds == {world.config.seed}
    assert {scope for _, scope in found} == {"client", "class"}
    assert {len(each) for each in found.values()} == {1} and len(found) == 2 * len(world.server.initial().blocks)
