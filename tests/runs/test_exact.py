"""Exact forgetting: the answer to a request is the retrained model, bit for bit, however it is come by."""

import json
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from tests.federation.test_node import node_of

import ease as ease_package
from ease.audit.config import AuditConfig
from ease.audit.exact import computed_again, hashes_of, rounds_of, sums_hash
from ease.commands.audit import audit_run
from ease.commands.forget import forget_run
from ease.errors import UserError
from ease.federation.middleware import Guarded
from ease.federation.node import listen, serve
from ease.federation.protocol import LocalJob, Middleware, Update
from ease.federation.remote import node_socket
from ease.federation.secure_aggregation import ADDENDS, MASKED
from ease.measures.evaluate import embed_pairs
from ease.methods import METHODS, make_method
from ease.methods.exact import Exact
from ease.methods.retrain import Retrain
from ease.model.closed_form import GRID, IMAGE_STRENGTHS, POWERS, TEXT_STRENGTHS, Ridge, Sums, on_grid, solve
from ease.operations.evidence import issue, verify
from ease.operations.purge import purge
from ease.params import Params
from ease.requests.request import ClassRequest, ClientRequest, Request, SampleRequest
from ease.runs.answers import StoredAnswer, answer_of, default_method, find_answer, open_world, release, trained_of
from ease.runs.config import RunConfig, load_config
from ease.runs.export import export
from ease.runs.forget import forget, train_further
from ease.runs.records import write_record
from ease.runs.resolve import RequestOptions
from ease.runs.run import Run
from ease.runs.using import Source, encode_text
from ease.runs.world import World
from ease.seeding import generator
from ease.storage import sha256
from ease.trainers.sums import (
    RANK_GRID,
    SECURE_SUMS,
    SUMS,
    Checksums,
    Collected,
    Sent,
    checksum,
    masked_sums_expected,
    sums_expected,
    sums_job,
    wrapped,
)

CLOSED_FORM = (
    "data.train=90",
    "data.validation=0",
    "data.test=20",
    "partition.clients=4",
    "partition.classes=3",
    "partition.scheme=uniform",
    "partition.validation_share=0.2",
    "model.lora=off",
    "model.projector=closed_form",
    "model.embedding=16",
    "engine=sequential",
    "gallery=20",
)


def settings(*more: str) -> RunConfig:
    return load_config(None, (*CLOSED_FORM, *more))


def trained(folder: Path, *more: str) -> tuple[Run, World]:
    config = settings(*more)
    run = Run.create(folder, config)
    list(run.train(open_world(run)))
    return run, open_world(run)


@dataclass(frozen=True)
class Site:
    """A trained run in a folder of its own."""

    run: Run
    world: World


@pytest.fixture(scope="module")
def runs(shared_cache, tmp_path_factory) -> dict[str, Path]:
    """A trained run for each place where sums may be kept. Copy them before writing."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EASE_CACHE", str(shared_cache))
        for history in ("server", "client"):
            run, _ = trained(tmp_path_factory.mktemp(history) / "run", f"training.history={history}")
            found[history] = run.folder
        run, _ = trained(tmp_path_factory.mktemp("secure") / "run", "training.secure=true")
        found["secure"] = run.folder
    return found


@pytest.fixture(params=["server", "client"])
def original(runs: dict[str, Path], request) -> Path:
    return runs[request.param]


@pytest.fixture
def site(original: Path, tmp_path: Path) -> Site:
    shutil.copytree(original, tmp_path / "run")
    run = Run.load(tmp_path / "run")
    return Site(run, open_world(run))


@pytest.fixture
def kept(runs: dict[str, Path], tmp_path: Path) -> Site:
    """One whose server keeps each client's sums."""
    shutil.copytree(runs["server"], tmp_path / "run")
    run = Run.load(tmp_path / "run")
    return Site(run, open_world(run))


def kinds(world: World) -> dict[str, Request]:
    ids = sorted(each for shard in world.shards for each in shard.train_ids)
    third = generator(0, "third").choice(ids, len(ids) // 3, replace=False)
    mixed = {*world.shards[2].train_ids, *ids[:3]}
    return {
        "client": ClientRequest(clients=(1,)),
        "two clients": ClientRequest(clients=(0, 3)),
        "class": ClassRequest(classes=(0,)),
        "samples": SampleRequest(ids=tuple(ids[::7])),
        "one pair": SampleRequest(ids=(ids[5],)),
        "a client and pairs": SampleRequest(ids=tuple(sorted(mixed)), clients=(2,), singles=3),
        "a third": SampleRequest(ids=tuple(sorted(map(str, third)))),
    }


def answered(run: Run, request: Request, name: str) -> tuple[str, str]:
    """Hashes of the sums and of the model of an answer."""
    method = make_method(name)
    list(forget(run, open_world(run), request, method, observe=False))
    stored = answer_of(run, request, method)
    assert sums_hash(run, stored)
    return sums_hash(run, stored), sha256(stored.model_path)


# --- forgetting is retraining ---


@pytest.mark.parametrize(
    "kind", ["client", "two clients", "class", "samples", "one pair", "a client and pairs", "a third"]
)
def test_forgetting_gives_the_bytes_of_retraining(site: Site, kind: str) -> None:
    request = kinds(site.world)[kind]
    exact = answered(site.run, request, "exact")
    assert exact == answered(site.run, request, "retrain")
    assert exact == computed_again(site.run, request), "no client is asked for this one"
    before = site.run.history
    assert exact[0] != before.sums_sha256(1) and exact[1] != sha256(before.state_path(1)), "something was forgotten"


@pytest.mark.slow
def test_a_sequence_of_twenty_requests_ends_where_retraining_does(kept: Site) -> None:
    """Each is released before the next; the last is compared with a training that never saw any of the pairs."""
    run = kept.run
    ids = sorted(each for shard in kept.world.shards for each in shard.train_ids)
    requests: list[Request] = [SampleRequest(ids=(each,)) for each in ids[::4][:17]]
    requests += [ClientRequest(clients=(2,)), ClassRequest(classes=(1,))]
    gone = {each for request in requests for each in ids if isinstance(request, SampleRequest) and each in request.ids}
    stay = [each for shard in kept.world.shards[:2] for each in shard.train_ids if each not in gone]
    requests.append(SampleRequest(ids=tuple(stay[-2:])))
    assert len(requests) == 20
    for request in requests[:-1]:
        answered(run, request, "exact")
        release(run, answer_of(run, request, Exact()).folder.relative_to(run.folder / "requests").as_posix())
        run = Run.load(run.folder)
    last = requests[-1]
    assert answered(run, last, "exact") == answered(run, last, "retrain") == computed_again(run, last)


def test_a_concept_is_forgotten_as_retraining_does(kept: Site, ease) -> None:
    """Words name the pairs; from then on it is a request like any other."""
    done = ease("forget", kept.run.folder, "--concept", "red", "--quiet")
    assert done.code == 0, done.err
    (path,) = kept.run.folder.glob("requests/concept-*/exact/record.json")
    stored = StoredAnswer(path.parent)
    request = stored.record().request
    exact = sums_hash(kept.run, stored), stored.model_sha256
    assert exact == answered(kept.run, request, "retrain") == computed_again(kept.run, request)
    assert exact[0] != kept.run.history.sums_sha256(1), "something was forgotten"


def test_the_order_of_two_requests_does_not_matter(original: Path, tmp_path: Path) -> None:
    found = []
    for number, order in enumerate(((0, 1), (1, 0))):
        shutil.copytree(original, tmp_path / str(number))
        run = Run.load(tmp_path / str(number))
        requests = [kinds(open_world(run))[kind] for kind in ("client", "class")]
        answered(run, requests[order[0]], "exact")
        release(run, answer_of(run, requests[order[0]], Exact()).folder.relative_to(run.folder / "requests").as_posix())
        found.append(answered(Run.load(run.folder), requests[order[1]], "exact"))
    assert found[0] == found[1]


@pytest.mark.slow
def test_engines_and_threads_give_the_same_bytes(tmp_path: Path, shared_cache) -> None:
    before, found = torch.get_num_threads(), []
    try:
        for engine, threads in (("sequential", 1), ("vectorized", 1), ("sequential", 2)):
            torch.set_num_threads(threads)
            run, world = trained(tmp_path / f"{engine}-{threads}", f"engine={engine}")
            record = run.history.record(1)
            found.append((record.sha256, record.ridge, *answered(run, kinds(world)["class"], "exact")))
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1] == found[2]


def test_a_client_whose_sums_are_kept_leaves_without_a_message(kept: Site) -> None:
    asked = Asked(kept.world.federation)
    list(Exact().unlearn(trained_of(kept.run), ClientRequest(clients=(1,)), asked))
    assert asked.who == []
    list(Exact().unlearn(trained_of(kept.run), kinds(kept.world)["samples"], asked))
    assert {job.data for job in asked.jobs} == {"forget"}


def test_with_only_a_total_the_other_clients_send_again(runs: dict[str, Path]) -> None:
    run = Run.load(runs["client"])
    world = open_world(run)
    assert not (run.history.update_path(1, 0)).exists(), "no client's sums lie at the server"
    asked = Asked(world.federation)
    list(Exact().unlearn(trained_of(run), ClientRequest(clients=(1,)), asked))
    assert asked.who == [0, 2, 3]


class Asked(Middleware):
    """A federation that notes who is asked for what."""

    def __init__(self, inner) -> None:
        super().__init__(inner)
        self.who, self.jobs = list[int](), list[LocalJob]()

    def run(self, params: Params, job: LocalJob, clients: Sequence[int]) -> Iterator[Update]:
        self.who += clients
        self.jobs.append(job)
        return super().run(params, job, clients)


# --- secure aggregation ---


@pytest.fixture
def secure(runs: dict[str, Path], tmp_path: Path) -> Site:
    """One whose server learns totals only."""
    shutil.copytree(runs["secure"], tmp_path / "secure")
    run = Run.load(tmp_path / "secure")
    return Site(run, open_world(run))


def test_secure_training_gives_the_bytes_of_plain_training(runs: dict[str, Path]) -> None:
    plain, secure = (Run.load(runs[name]).history for name in ("client", "secure"))
    assert plain.record(1).sha256 == secure.record(1).sha256
    assert plain.ridge(1) == secure.ridge(1) and plain.pairs(1) == secure.pairs(1)
    assert not secure.updates and not secure.update_path(1, 0).exists()


@pytest.mark.parametrize("kind", ["client", "class", "samples", "a client and pairs"])
def test_secure_forgetting_gives_the_bytes_of_retraining(secure: Site, kind: str) -> None:
    request = kinds(secure.world)[kind]
    exact = answered(secure.run, request, "exact")
    assert exact == answered(secure.run, request, "retrain") == computed_again(secure.run, request)
    assert exact[0] != secure.run.history.sums_sha256(1), "something was forgotten"


@pytest.mark.parametrize("kind", ["client", "class"])
def test_no_unmasked_sums_leave_a_client(secure: Site, kind: str) -> None:
    asked = Asked(secure.run.hosted(secure.world).federation)
    list(Exact().unlearn(trained_of(secure.run), kinds(secure.world)[kind], asked))
    names = [job.objective for job in asked.jobs]
    assert names == ["secure: advertise keys", "secure: share keys", SECURE_SUMS, "secure: unmask"]


def test_a_class_is_forgotten_only_with_everyone(secure: Site) -> None:
    federation = Silent(secure.run.hosted(secure.world).federation)
    with pytest.raises(UserError, match=r"3 of 4 clients sent masked sums and 4 are needed \(client 1: "):
        list(Exact().unlearn(trained_of(secure.run), ClassRequest(classes=(0,)), federation))
    leaves = Exact().unlearn(trained_of(secure.run), ClientRequest(clients=(0,)), federation)
    assert [each.client for each in next(leaves).round.updates] == [2, 3]


class Silent(Middleware):
    """Client 1 drops out once it has shared its keys."""

    def run(self, params: Params, job: LocalJob, clients: Sequence[int]) -> Iterator[Update]:
        gone = {1} if job.objective == SECURE_SUMS else set()
        yield from super().run(params, job, [client for client in clients if client not in gone])


@pytest.mark.parametrize("place", [-1, 1, 0])
def test_a_wrong_total_is_refused(secure: Site, place: int) -> None:
    """No one can tell whose sums are wrong, as no one sees them."""

    class LyingInSecret(Middleware):
        def run(self, params: Params, job: LocalJob, clients: Sequence[int]) -> Iterator[Update]:
            for update in super().run(params, job, clients):
                if update.client == 1 and MASKED in update.values:
                    update.values[MASKED][place] += {-1: -5, 1: GRID**2 * 10**5, 0: 2**62}[place]
                yield update

    lying = LyingInSecret(secure.run.hosted(secure.world).federation)
    reason = {-1: "and .* are expected", 1: "not positive semi-definite", 0: "larger than those of any"}[place]
    with pytest.raises(UserError, match=f"the total of 3 clients is refused: .*{reason}.*cannot show whose"):
        list(Exact().unlearn(trained_of(secure.run), ClientRequest(clients=(0,)), lying))


def test_a_client_says_how_many_pairs_it_adds_up(secure: Site) -> None:
    """Where the server knows the number, another one is refused and the client named."""
    request = SampleRequest(ids=secure.world.shards[1].train_ids[:3])
    job = sums_job(secure.run.config.training, 0, 0.07, request, "forget").own(1, secure.world.shards[1].train_ids)
    held = len(secure.world.shards[1].train_ids)
    fault = masked_sums_expected(trained_of(secure.run).start, job, 1, held).fault
    assert fault is not None
    for pairs, words in ((3, None), (2, "its sums are of 2 pairs, and 3 are expected")):
        assert fault(Update(1, held, None, {ADDENDS: torch.tensor(pairs)})) == words


def test_the_last_client_cannot_remain_by_itself(secure: Site) -> None:
    with pytest.raises(UserError, match="1 client takes part, whose sums would be the total"):
        federation = secure.run.hosted(secure.world).federation
        list(Exact().unlearn(trained_of(secure.run), ClientRequest(clients=(0, 1, 2)), federation))


def test_secure_answers_are_released_purged_and_certified(secure: Site, ease, tmp_path: Path) -> None:
    run = secure.run
    answered(run, kinds(secure.world)["class"], "exact")
    audit_run(run.folder, "class-0", AuditConfig(), retrain=True, quiet=True)
    found = verify(certified(run, tmp_path, "class-0"), run)
    assert found.holds, found.reasons
    release(run, "class-0/exact")
    list(purge(run.folder))
    run = Run.load(run.folder)
    request = ClientRequest(clients=(2,))
    assert answered(run, request, "exact") == answered(run, request, "retrain") == computed_again(run, request)


@pytest.mark.parametrize(
    "setting, reason",
    [("model.projector=mlp", "only sums are aggregated securely"), ("training.history=server", "cannot store them")],
)
def test_settings_that_secure_aggregation_excludes_are_refused(ease, tmp_path: Path, setting: str, reason: str) -> None:
    chosen = [part for each in (*CLOSED_FORM, "training.secure=true", setting) for part in ("--set", each)]
    refused = ease("train", "--out", tmp_path / "run", *chosen)
    assert refused.code == 2 and reason in refused.err and refused.err.count("\n") == 1


# --- sums that cannot be ---


class Lying(Middleware):
    """Client 1 sends other sums than its own."""

    def __init__(self, inner, damage: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(inner)
        self.damage = damage

    def run(self, params: Params, job: LocalJob, clients: Sequence[int]) -> Iterator[Update]:
        for update in super().run(params, job, clients):
            if update.client == 1 and SUMS in update.values:
                update = replace(update, values={**update.values, SUMS: self.damage(update.values[SUMS].clone())})
            yield update


def with_entry(place: int, change: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def damage(packed: torch.Tensor) -> torch.Tensor:
        packed[place] += change
        return packed

    return damage


LIES = {
    "fewer pairs": (with_entry(-1, -5), "are expected"),
    "no whole pair": (with_entry(-1, -1), "are expected"),
    "not positive semi-definite": (with_entry(1, GRID**2 * 10**4), "positive semi-definite"),
    "too large": (
        lambda packed: packed * torch.where(torch.arange(len(packed)) < len(packed) - 1, 9, 1),
        "larger than",
    ),
    "negative": (lambda packed: torch.cat([-packed[:-1], packed[-1:]]), "negative"),
    "beyond the range": (with_entry(0, 2**62), "outside"),
    "another size": (lambda packed: packed[:-1], "shape"),
    "floats": (lambda packed: packed.double(), "dtype"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_client_that_sends_impossible_sums_is_named_and_left_out(kept: Site, lie: str) -> None:
    damage, reason = LIES[lie]
    lying = Guarded(Lying(kept.world.federation, damage), kept.run.config.training)
    method, trained_run = Retrain(), trained_of(kept.run)
    request = SampleRequest(ids=kept.world.shards[0].train_ids[:2])
    step = next(method.unlearn(trained_run, request, lying))
    assert reason in lying.left_out()[1]
    honest = next(method.unlearn(trained_run, ClientRequest(clients=(1,)), WithoutPairs(kept.world, request)))
    assert step.state == honest.state, "the others' sums count, and nothing of client 1's"


def WithoutPairs(world: World, request: Request):
    return world.without(request).federation


def test_forgetting_stops_where_a_holder_sends_impossible_sums(kept: Site) -> None:
    lying = Guarded(Lying(kept.world.federation, with_entry(1, GRID**2 * 10**4)), kept.run.config.training)
    with pytest.raises(UserError, match=r"client 1: .*positive semi-definite.*run the same command again"):
        list(Exact().unlearn(trained_of(kept.run), ClassRequest(classes=(0,)), lying))


def test_forget_sums_of_other_pairs_are_refused_by_what_would_be_left(kept: Site) -> None:
    """They are sums of some pairs, but not of any that the client trained on."""
    image, text = (trained_of(kept.run).initial[f"{side}.projector.0.weight"].shape[1] for side in ("image", "text"))
    rng = torch.Generator().manual_seed(0)
    drawn = (torch.randn(1, *shape, generator=rng, dtype=torch.double) for shape in ((image,), (5, text)))
    other = Sums.of(*((each * GRID / 2).round() for each in drawn))
    request = SampleRequest(ids=kept.world.shards[1].train_ids[:1])
    lying = Guarded(Lying(kept.world.federation, lambda packed: other.packed), kept.run.config.training)
    with pytest.raises(
        UserError, match=r"client 1: without the sums of its forget pairs sums .*(semi-definite|negative)"
    ):
        list(Exact().unlearn(trained_of(kept.run), request, lying))


def test_the_server_knows_only_the_count_of_single_pairs(kept: Site) -> None:
    request = SampleRequest(ids=kept.world.shards[1].train_ids[:3])
    job = sums_job(kept.run.config.training, 0, 0.07, request, "forget")
    state = trained_of(kept.run).start
    update = next(iter(kept.world.federation.run(state, job, [1])))
    held = len(kept.world.shards[1].train_ids)
    fault = sums_expected(state, job.own(1, kept.world.shards[1].train_ids), 1, held).fault
    assert fault is not None and fault(update) is None
    fewer = sums_expected(state, replace(job, request=SampleRequest(ids=request.ids[:2])), 1, held).fault
    assert fewer is not None and "of 3 pairs, and 2 are expected" in str(fewer(update))


def test_memory_does_not_grow_with_clients_where_only_the_total_is_kept() -> None:
    """10,000 clients of 100 pairs: the server holds one total and a number for each."""
    one = Sums.of(on_grid(torch.randn(100, 6)), on_grid(torch.randn(100, 5, 4)))
    sent = Sent(one, Checksums(named=7, others=0))
    found = Collected.of(((client, sent) for client in range(10_000)), kept=False)
    assert found.total is not None and torch.equal(found.total.packed, one.packed * 10_000)
    assert found.total.count == 5 * 1_000_000
    assert all(update.delta is None and update.pairs == 100 for update in found.updates.values())


# --- features that are computed otherwise ---


@pytest.fixture
def rounded(monkeypatch) -> Callable[[], None]:
    """Call it, and from then on one feature falls on the next grid point, as on another machine."""

    def grid(features: torch.Tensor) -> torch.Tensor:
        found = on_grid(features)
        found[..., 3] += 1
        return found

    return lambda: monkeypatch.setattr("ease.trainers.sums.on_grid", grid)


@pytest.mark.parametrize(("place", "kind"), [("server", "class"), ("client", "samples"), ("secure", "class")])
def test_other_features_than_in_training_are_refused(runs, tmp_path: Path, rounded, place: str, kind: str) -> None:
    """What is subtracted would not be what was added; the remedy is one round, and later requests go on from it."""
    run = Run.load(Path(shutil.copytree(runs[place], tmp_path / "run")))
    request = kinds(open_world(run))[kind]
    rounded()
    with pytest.raises(UserError, match=r"client 0, client 1, client 2 and 1 more: features .*--method retrain"):
        answered(run, request, "exact")
    answered(run, request, "retrain")
    release(run, answer_of(run, request, Retrain()).folder.relative_to(run.folder / "requests").as_posix())
    later = SampleRequest(ids=open_world(Run.load(run.folder)).shards[0].train_ids[:1])
    assert answered(Run.load(run.folder), later, "exact") == computed_again(Run.load(run.folder), later)


def test_an_audit_names_clients_whose_features_have_changed(kept: Site, rounded) -> None:
    """No client is asked when another one leaves, so that only retraining shows it."""
    list(forget(kept.run, kept.world, ClientRequest(clients=(1,)), Exact()))
    rounded()
    found = audit_run(kept.run.folder, "client-1", AuditConfig(), retrain=True, quiet=True)
    assert found.exit_code == 1 and found.verdict.passed is False
    assert any("client 0, client 2, client 3: the features" in each for each in found.warnings)


def test_checksums_are_of_features_and_with_a_secret_of_no_use_to_others() -> None:
    image, text = on_grid(torch.randn(7, 6)), on_grid(torch.randn(7, 5, 4))
    whole = checksum(image, text, b"")
    assert wrapped(checksum(image[:3], text[:3], b"") + checksum(image[3:], text[3:], b"")) == wrapped(whole)
    assert checksum(image.flip(0), text.flip(0), b"") == whole, "in any order"
    assert checksum(image, text, b"secret") != whole
    text[2, 1, 0] += 1
    assert checksum(image, text, b"") != whole
    assert all(-(2**63) <= wrapped(each) < 2**63 for each in (0, 2**63, 2**64 - 1, whole))


# --- the choice of strengths ---


def test_the_strengths_are_those_that_find_held_out_pairs_best(kept: Site) -> None:
    """Against a search by hand over the pairs that each client holds out."""
    run, world = kept.run, kept.world
    sums, initial = Sums.from_state(run.history.sums(1)), trained_of(run).initial

    def score(ridge: Ridge) -> int:
        maps, seen, total = solve(sums, ridge, initial), world.evaluator, 0
        for shard in world.shards:
            image, text = embed_pairs(seen.model, maps, seen.activations, shard.validation, seen.device)
            similar = (image @ text.flatten(0, 1).T).view(len(image), *text.shape[:2]).tolist()
            everyone = range(len(image))
            for pair in everyone:
                best = max(similar[pair][pair])
                found = [sum(each > best for captions in similar[pair] for each in captions)]
                for caption, own in enumerate(similar[pair][pair]):
                    found.append(sum(similar[other][pair][caption] > own for other in everyone))
                total += sum(round(RANK_GRID / (1 + others)) for others in found)
        return total

    power = max(POWERS, key=lambda power: score(Ridge(power=power)))
    text = max(TEXT_STRENGTHS, key=lambda text: score(Ridge(text=text, power=power)))
    image = max(IMAGE_STRENGTHS, key=lambda image: score(Ridge(image=image, text=text, power=power)))
    assert run.history.ridge(1) == Ridge(image=image, text=text, power=power)
    assert len({score(Ridge(power=power)) for power in POWERS}) > 1, "there was something to choose"


def test_strengths_are_recorded_and_kept(kept: Site) -> None:
    chosen = kept.run.history.ridge(1)
    for name in ("exact", "retrain"):
        answered(kept.run, kinds(kept.world)["client"], name)
        stored = answer_of(kept.run, kinds(kept.world)["client"], make_method(name))
        assert rounds_of(kept.run, stored).ridge(1) == chosen


# --- commands ---


def test_a_run_forgets_exactly_by_default_and_no_other_way(kept: Site, ease) -> None:
    folder = kept.run.folder
    assert default_method(kept.run) == Exact()
    reported = ease("forget", folder, "--client", "1", "--quiet")
    assert "audit:" not in reported.out, "an exact answer can always be audited"
    assert reported.code == 0 and (folder / "requests" / "client-1" / "exact" / "record.json").is_file()
    for name in sorted(set(METHODS) - {"exact", "retrain"}):
        refused = ease("forget", folder, "--client", "1", "--method", name)
        assert refused.code == 2
        assert refused.err.count("\n") == 1 and "leave out --method" in refused.err


def test_exact_forgetting_of_a_trained_model_is_refused(ease, one_forgotten: Path) -> None:
    refused = ease("forget", one_forgotten, "--client", "1", "--method", "exact")
    assert refused.code == 2
    assert "only for runs with a closed-form head" in refused.err


@pytest.mark.parametrize(
    "setting",
    [
        "training.rounds=2",
        "training.participation=0.5",
        "training.history_precision=float16",
        "training.aggregation=median",
        "training.strategy=fedprox",
        "training.shards=2",
        "model.lora=ffa",
    ],
)
def test_settings_that_sums_do_not_have_are_refused(setting: str) -> None:
    with pytest.raises(UserError, match="closed_form"):
        settings(setting)


def test_an_audit_compares_hashes_and_says_why_nothing_is_tested(kept: Site) -> None:
    forget_run(kept.run.folder, RequestOptions(clients=[1]), Exact(), quiet=True)
    found = audit_run(kept.run.folder, "client-1", AuditConfig(), retrain=False, quiet=True)
    verdict = found.verdict
    assert verdict.passed and verdict.words.startswith("Identical to retraining: ")
    assert found.exit_code == 0 and found.next_steps == ()
    assert verdict.identity is not None and verdict.identity.model == found.retrain_sha256
    assert not (kept.run.folder / "shadows").exists(), "no shadow model is trained"
    shown = json.loads((found.folder / "audit.json").read_text())
    assert shown["verdict"]["reason"] == "identical to retraining" and shown["verdict"]["passed"] is True


def test_a_certificate_holds_and_both_hashes_are_in_it(kept: Site, tmp_path: Path) -> None:
    forget_run(kept.run.folder, RequestOptions(clients=[1]), Exact(), quiet=True)
    audit_run(kept.run.folder, "client-1", AuditConfig(), retrain=False, quiet=True)
    path = certified(kept.run, tmp_path)
    found = verify(path, kept.run)
    assert found.holds, found.reasons
    assert found.certificate is not None
    models = found.certificate.models
    assert models.sums == models.retrain_sums and models.after == models.retrain
    assert found.certificate.verdict.words.startswith("Identical to retraining")
    assert next(check for check in found.checks if check.name == "computed again").holds


@pytest.mark.parametrize("audited", [True, False])
def test_an_answer_with_one_pair_left_in_is_refused(kept: Site, tmp_path: Path, audited: bool) -> None:
    """Whoever wrote it wrote every hash of it as well, and those of the retraining beside it."""
    run, world = kept.run, kept.world
    request = SampleRequest(ids=world.shards[0].train_ids[:4], name="four")
    fewer = SampleRequest(ids=request.ids[:3])
    for method in (Exact(), Retrain()):
        list(forget(run, world, request, method))
        stored = answer_of(run, request, method)
        forge(run, stored, next(method.unlearn(trained_of(run), fewer, Guarded(world.federation, run.config.training))))
    if audited:
        words = audit_run(run.folder, "four/exact", AuditConfig(), retrain=False, quiet=True).verdict.words
        assert words.startswith("Identical"), "the forged retraining agrees with the forged answer"
    found = verify(certified(run, tmp_path, "four"), run)
    assert not found.holds
    assert any("not solved from the retained pairs only" in reason for reason in found.reasons)


def forge(run: Run, stored: StoredAnswer, step) -> None:
    """Put another result in the place of an answer, with records that fit it."""
    history = rounds_of(run, stored)
    shutil.rmtree(stored.rounds_path)
    history.append(step.round)
    step.state.save(stored.model_path)
    record = stored.record()
    files = {**record.files, "model.safetensors": sha256(stored.model_path)}
    write_record(stored.record_path, record.model_copy(update={"files": files}))


def certified(run: Run, folder: Path, name: str = "client-1") -> Path:
    path = folder / "certificate.json"
    path.write_bytes(issue(run, name).file_bytes() + b"\n")
    return path


def test_an_audit_sees_that_an_answer_is_not_the_retrained_model(kept: Site) -> None:
    run, world = kept.run, kept.world
    request = SampleRequest(ids=world.shards[0].train_ids[:4], name="four")
    list(forget(run, world, request, Exact()))
    fewer = SampleRequest(ids=request.ids[:3])
    sound = Guarded(world.federation, run.config.training)
    forge(run, answer_of(run, request, Exact()), next(Exact().unlearn(trained_of(run), fewer, sound)))
    found = audit_run(run.folder, "four", AuditConfig(), retrain=False, quiet=True)
    assert found.verdict.passed is False and found.exit_code == 1
    assert "gives another result" in found.verdict.words


def test_purging_leaves_the_sums_of_the_release_and_no_others(kept: Site) -> None:
    run = kept.run
    request = kinds(kept.world)["class"]
    answered(run, request, "exact")
    before = {run.history.sums_sha256(1), *(sha256(path) for path in run.folder.glob("rounds/*/updates.bin"))}
    release(run, "class-0/exact")
    list(purge(run.folder))
    run = Run.load(run.folder)
    assert run.history.sums_sha256(1) == sums_hash(run, StoredAnswer(run.folder / "requests/class-0/exact"))
    assert not before & {sha256(path) for path in run.folder.rglob("*") if path.is_file()}
    request = ClientRequest(clients=(2,))
    assert answered(run, request, "exact") == answered(run, request, "retrain") == computed_again(run, request)


def test_more_training_is_refused(kept: Site, ease) -> None:
    answered(kept.run, ClientRequest(clients=(1,)), "exact")
    refused = ease("train", "--resume", kept.run.folder, "--after", "client-1")
    assert refused.code == 2 and "closed-form" in refused.err
    refused = ease("train", "--resume", kept.run.folder, "--until", "3")
    assert refused.code == 2 and "closed-form" in refused.err


def test_an_export_computes_what_the_run_does(kept: Site, tmp_path: Path) -> None:
    export(kept.run, None, "safetensors", tmp_path / "out")
    own, exported = Source.of(kept.run, None), Source.of_export(tmp_path / "out")
    texts = ["a red car at night", "two dogs"]
    assert torch.equal(encode_text(own, texts), encode_text(exported, texts))
    scope: dict[str, object] = {"__name__": "load", "__file__": str(tmp_path / "out" / "load.py")}
    exec((tmp_path / "out" / "load.py").read_text(), scope)
    model = scope["Model"](tmp_path / "out")  # type: ignore[operator]
    assert scope["check"](model) < 1e-5  # type: ignore[operator]


def test_the_queue_answers_exactly(kept: Site, ease) -> None:
    folder = kept.run.folder
    assert ease("request", "add", folder, "--client", "1", "--approve", "--quiet").code == 0
    assert ease("request", "add", folder, "--class", "0", "--approve", "--quiet").code == 0
    assert ease("work", folder, "--quiet", "--set", "hold.retain_points=100").code == 0
    releases = Run.load(folder).head.releases
    assert [each.answer for each in releases] == ["client-1/exact", "class-0/exact"]
    stored, request, _ = find_answer(Run.load(folder), "class-0/exact")
    run = Run.load(folder)
    assert (sums_hash(run, stored), sha256(stored.model_path)) == computed_again(run, request)


def test_the_report_page_shows_the_verdict(kept: Site, ease, tmp_path: Path) -> None:
    folder = kept.run.folder
    assert ease("forget", folder, "--client", "1", "--quiet").code == 0
    assert ease("audit", folder, "--request", "client-1", "--quiet", "--json").code == 0
    assert ease("report", folder, "--out", tmp_path / "report.html", "--quiet").code == 0
    assert "Identical to retraining" in (tmp_path / "report.html").read_text()


def test_hashes_of_a_round_are_those_of_its_files(kept: Site) -> None:
    request = ClientRequest(clients=(1,))
    step = next(Exact().unlearn(trained_of(kept.run), request, kept.world.federation))
    assert step.round is not None and hashes_of(step.round) == answered(kept.run, request, "exact")
    with pytest.raises(UserError, match="closed-form"):
        list(train_further(kept.run, kept.world, "client-1", 2, locked=False))


def test_python_forgets_and_audits_exactly(kept: Site) -> None:
    answer = ease_package.open_run(kept.run.folder).forget(client=1, quiet=True)
    assert answer.name == "client-1/exact"
    verdict = answer.audit(quiet=True)
    assert verdict.passed and verdict.words.startswith("Identical to retraining")


# --- who joins ---


CONSENT = ("--consent", "they agreed", "--by", "someone")


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("client", "secure")]


@pytest.fixture(scope="module", params=["server", *SLOW])
def waiting(request, tmp_path_factory, shared_cache) -> Path:
    """A run with pairs in its data that are no one's yet. Copy it before writing."""
    more = "training.secure=true" if request.param == "secure" else f"training.history={request.param}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EASE_CACHE", str(shared_cache))
        return trained(tmp_path_factory.mktemp("waiting") / "run", more, "data.validation=12")[0].folder


@pytest.fixture
def growing(waiting: Path, tmp_path: Path) -> Run:
    run = Run.load(Path(shutil.copytree(waiting, tmp_path / "run")))
    (tmp_path / "new.txt").write_text("\n".join(run.known()[0].validation))  # type: ignore[index]
    return run


def summary(ease, *arguments: object) -> dict[str, object]:
    done = ease(*arguments, "--json", "--quiet")
    assert done.code == 0, done.err
    return json.loads(done.out)


def joined_run(run: Run, ease, *more: object) -> Run:
    """The run with a client more: of those in `new.txt`, if no others are named."""
    found = summary(ease, "join", run.folder, *CONSENT, *(more or ("--samples", run.folder.parent / "new.txt")))
    run = Run.load(run.folder)
    assert found["model_sha256"] == run.history.state_sha256(1) and found["client"] in run.history.clients(1)
    return run


def test_who_returns_restores_the_bytes_from_before(growing: Run, ease, tmp_path: Path) -> None:
    """A client leaves, is purged and joins again: sums and model are those of the training that it was in."""
    before = growing.history.sums_sha256(1), growing.history.state_sha256(1)
    holding = growing.known()[0].clients[1]  # type: ignore[index]
    ids = (*holding.train_ids, *holding.validation_ids)
    (tmp_path / "ids.txt").write_text("\n".join(ids))
    answered(growing, ClientRequest(clients=(1,)), "exact")
    release(growing, "client-1/exact")
    list(purge(growing.folder))
    run = joined_run(growing, ease, "--samples", tmp_path / "ids.txt", "--again-after", "1")
    assert (run.history.sums_sha256(1), run.history.state_sha256(1)) == before
    assert run.history.clients(1) == [0, 2, 3, 4]
    again = ClientRequest(clients=(4,))
    left = answered(run, again, "exact")
    assert left == answered(run, again, "retrain") == computed_again(run, again)
    first = StoredAnswer(run.folder / "requests" / "client-1" / "exact")
    assert left == (sums_hash(run, first), first.model_sha256), "as after it left for the first time"


def test_a_newcomer_is_in_the_sums_and_leaves_them_again(growing: Run, ease, tmp_path: Path) -> None:
    before = growing.history.sums_sha256(1), growing.history.state_sha256(1)
    run = joined_run(growing, ease)
    assert run.history.clients(1) == [0, 1, 2, 3, 4] and run.history.sums_sha256(1) != before[0]
    assert summary(ease, "join", run.folder, *CONSENT, "--samples", tmp_path / "new.txt")["added"] is False
    assert len(Run.load(run.folder).head.extensions) == 1
    request = kinds(open_world(run))["class"]
    assert answered(run, request, "exact") == answered(run, request, "retrain") == computed_again(run, request)
    release(run, "class-0/exact")
    run = Run.load(run.folder)
    assert verify(certified(run, tmp_path, "class-0"), run).holds, "also once it is released"
    list(purge(run.folder))
    assert not (run.folder / "joined" / "client-4" / "rounds").exists(), "sums from before the request"
    run = Run.load(run.folder)
    leaves = ClientRequest(clients=(4,))
    assert answered(run, leaves, "exact") == answered(run, leaves, "retrain") == computed_again(run, leaves)


def test_a_newcomer_that_leaves_again_leaves_nothing(growing: Run, ease) -> None:
    before = growing.history.sums_sha256(1), growing.history.state_sha256(1)
    run = joined_run(growing, ease)
    assert answered(run, ClientRequest(clients=(4,)), "exact") == before


def test_a_join_that_was_killed_is_finished_by_the_same_command(growing: Run, ease, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("ease.runs.joined.write_head", lambda *given: (_ for _ in ()).throw(UserError("killed")))
        assert ease("join", growing.folder, *CONSENT, "--samples", growing.folder.parent / "new.txt").code == 2
    assert growing.history.clients(1) == [0, 1, 2, 3]
    assert joined_run(growing, ease).history.clients(1) == [0, 1, 2, 3, 4]


def test_most_of_the_data_may_be_forgotten_without_a_new_training(kept: Site, ease) -> None:
    """A queue trains from the start once much is gone, since approximate subtractions wear out; these do not."""
    folder = kept.run.folder
    assert ease("request", "add", folder, "--client", "0", "--client", "1", "--client", "2", "--approve").code == 0
    assert ease("work", folder, "--quiet", "--set", "hold.retain_points=100").code == 0
    assert [each.answer for each in Run.load(folder).head.releases] == ["client-0-1-2/exact"]


# --- clients as processes ---


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("training.secure=true",)])
def test_nodes_give_the_bytes_of_one_process(tmp_path: Path, shared_cache, more: Sequence[str]) -> None:
    """Over sockets: training, a client that leaves, pairs of several clients, and retraining."""
    here, world = trained(tmp_path / "here")
    sockets = tmp_path / "federation"
    lines = [listen(node_socket(sockets, shard.client)) for shard in world.shards]
    try:
        for shard, line in zip(world.shards, lines, strict=True):
            node = node_of(world, shard.client, sockets / str(shard.client))
            threading.Thread(target=serve, args=(node, line), daemon=True).start()
        there, _ = trained(tmp_path / "there", "engine=nodes", f"federation={sockets}", *more)
        for run in (here, there):
            answered(run, kinds(world)["samples"], "exact")
        assert there.history.record(1).sha256 == here.history.record(1).sha256
        assert there.history.ridge(1) == here.history.ridge(1)
        for kind in ("client", "class", "a client and pairs"):
            request = kinds(world)[kind]
            assert answered(there, request, "exact") == answered(here, request, "exact")
            assert answered(there, request, "retrain") == computed_again(there, request)
    finally:
        for line in lines:
            line.close()
