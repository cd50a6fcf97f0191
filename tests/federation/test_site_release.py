"""The hold on retained recall where pairs lie at their sites: the sites measure it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.federation.on_site import Sites, lasting
from tests.federation.test_site_audit import BY_HEART
from tests.operations.ledger.test_work import add, ids_of, listed, run_json

from ease.audit.at_sites import retained_recalls
from ease.operations.ledger import work
from ease.requests.request import ClientRequest
from ease.runs.answers import open_world, trained_of
from ease.runs.run import Run


@pytest.fixture(scope="module")
def sites(drawn: Path, small: tuple[str, ...], shared_cache: Path, tmp_path_factory) -> Iterator[Sites]:
    with lasting(drawn, tmp_path_factory, (*small, *BY_HEART), shared_cache) as made:
        made.trained()
        yield made


def test_sites_measure_the_recall_of_their_retained_pairs(sites: Sites) -> None:
    run = Run.load(sites.folder / "apart")
    world, trained = open_world(run), trained_of(run)
    everyone = run.hosted(world).federation
    learnt, initial = retained_recalls(world, ClientRequest(clients=(1,)), (trained.final, trained.initial), everyone)
    assert learnt is not None and initial is not None and learnt > 90 and initial < 70


def test_a_fall_of_retained_recall_at_the_sites_holds_the_model(ease, sites: Sites, tmp_path: Path) -> None:
    run = sites.folder / "apart"
    add(ease, run, "--samples", listed(tmp_path, ids_of(run, 0, 2)), id="s")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(work, "retained_recalls", lambda *_: (80.0, 60.0))
        settings = ("--no-audit", "--set", "retrain.forgotten_fraction=1")
        (held,) = run_json(ease, "work", run, *settings, code=4)["finished"]
    assert held["state"] == "held" and held["why"].startswith("recall@1 of retained pairs fell by 20.0 points")
    run_json(ease, "request", "approve", run, "s")
    (done,) = run_json(ease, "work", run, "--no-audit", "--set", "retrain.forgotten_fraction=1")["finished"]
    assert done["state"] == "done" and done["outcome"]["retain_before"] > 90
