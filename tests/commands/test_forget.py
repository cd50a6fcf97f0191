"""`ease forget`, `ease train --after` and `ease demo` as a user meets them, mistakes above all."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests import faults

from ease.commands.train import train_run
from ease.data.words import content, says_all
from ease.errors import UserError
from ease.federation.fedavg import participants
from ease.federation.sequential import Sequential
from ease.methods import METHODS
from ease.methods.ease.method import final_loss, share_prior
from ease.requests.request import ClassRequest
from ease.runs.answers import trained_of
from ease.runs.config import load_config
from ease.runs.run import Run
from ease.runs.world import World
from ease.storage import read_json


def settings(*assignments: str) -> list[str]:
    return [word for assignment in assignments for word in ("--set", assignment)]


def fingerprint(folder: Path) -> dict[str, str]:
    """Every file and folder of a run with its hash."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture(scope="module")
def finished(small, shared_cache, tmp_path_factory) -> Path:
    """A finished run. Copy it before writing into it."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EASE_CACHE", str(shared_cache))
        train_run(load_config(None, (*small, "partition.validation_share=0.3")), folder, quiet=True)
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


@pytest.fixture
def refused(ease) -> Callable[..., None]:
    """A command must be refused: code 2, one line that holds all parts, no result, the run as it was."""

    def check(folder: Path, arguments: list[object], *parts: str) -> None:
        before = fingerprint(folder)
        result = ease("forget", folder, *arguments)
        assert result.code == 2, result
        assert result.out == "" and "Traceback" not in result.err
        first, _, rest = result.err.partition("\n")
        err = rest if first.startswith("forgetting ") else result.err  # what only the work finds out comes after it
        assert err.startswith("error: ") and err.count("\n") == 1 and err.endswith("\n")
        for part in parts:
            assert part in err, err
        assert fingerprint(folder) == before

    return check


def ids_file(folder: Path, *ids: str) -> Path:
    (folder / "ids.txt").write_text("\n".join(ids))
    return folder / "ids.txt"


# --- what the user gets ---


def test_a_request_ends_with_the_share_and_recalls(ease, run: Path) -> None:
    result = ease("forget", run, "--client", 1)
    assert result.code == 0
    for part in (
        "subtracted",
        "110% of the forget contribution",  # two rounds leave a large loss
        "trained",
        "ease",
        "model and record in",
    ):
        assert part in result.out, result.out
    assert "2/2" in result.err and "forget R@1" in result.err
    assert (run / "requests" / "client-1" / "ease" / "model.safetensors").is_file()


@pytest.mark.parametrize("kind", ["clients", "class", "classes", "samples"])
def test_every_kind_of_request_prints_one_object(ease, run: Path, tmp_path: Path, kind: str) -> None:
    world = World.open(Run.load(run).config)
    chosen = [pair_id for shard in world.shards for pair_id in shard.train_ids[:3]]
    arguments = {
        "clients": ["--client", 0, "--client", 2],
        "class": ["--class", "1"],
        "classes": ["--class", "1", "--class", "2"],
        "samples": ["--samples", ids_file(tmp_path, *chosen, "", chosen[0])],
    }[kind]
    result = ease("forget", run, *arguments, "--json", "--set", "share=0.5")
    assert result.code == 0 and result.err == "" and result.out.count("\n") == 1
    summary = json.loads(result.out)
    assert summary["request"]["scope"] == {"clients": "client", "class": "class", "classes": "class"}.get(
        kind, "sample"
    )
    assert summary["method"]["share"] == 0.5 and Path(summary["folder"]).is_dir()
    assert 0 <= summary["metrics"]["forget/recall@1"] <= 100
    again = ease("forget", run, *arguments, "--json", "--set", "share=0.5")
    assert json.loads(again.out) == summary


def test_a_quick_check_ends_a_result_and_names_the_needs_of_an_audit(ease, run: Path) -> None:
    first = ease("forget", run, "--client", "1", "--method", "finetune", "--quiet")
    assert "quick check, no verdict: " in first.out
    shown = json.loads(ease("forget", run, "--client", "1", "--method", "finetune", "--json").out)
    kept = read_json(run / "requests" / "client-1" / "finetune" / "quick.json")
    assert shown["check"] == kept and kept["words"] in first.out
    assert f"audit: {shown['prospects']}" in first.out
    pool, _, why = shown["prospects"].partition(
        "; an audit will go by ranks and levels compared with retraining only: "
    )
    assert pool.startswith("an audit will compare with 16 pairs instead of 512, since there are 20 validation and test")
    assert why.endswith("and 0 of those are of the forget pairs' pseudo-classes")
    asked = ("audit", run, "--request", "client-1/finetune", "--retrain", "--retrains", 1, "--workers", 1, "--json")
    assert ease(*asked, "--pool", 512).code == 2, "there are not so many pairs"
    found = ease(*asked)
    assert found.code == 0, found
    assert f"no attacks were made: {why}" in json.loads(found.out)["warnings"], "what was foretold happens"


def test_without_held_out_pairs_there_is_not_a_quick_check_and_the_result_is_valid(ease, small, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_run(load_config(None, (*small, "partition.validation_share=0")), run, quiet=True)
    result = ease("forget", run, "--client", "1", "--method", "finetune")
    assert result.code == 0 and "no quick check: 20 forget pairs and 0 held-out pairs" in result.out
    assert not (run / "requests" / "client-1" / "finetune" / "quick.json").exists()
    shown = json.loads(ease("forget", run, "--client", "1", "--method", "finetune", "--json").out)
    assert shown["check"] is None and shown["why_no_check"].startswith("20 forget pairs and 0 held-out pairs")


def test_display_options_do_not_change_stored_files(ease, run: Path) -> None:
    """Every round of every method is measured, whether or not anybody watches."""
    assert ease("forget", run, "--client", 1, "--method", "finetune", "--quiet").code == 0
    folder = run / "requests" / "client-1" / "finetune"
    quiet = json.loads((folder / "record.json").read_text())
    shutil.rmtree(folder)
    assert ease("forget", run, "--client", 1, "--method", "finetune").code == 0
    assert json.loads((folder / "record.json").read_text())["rounds"] == quiet["rounds"]
    assert all("forget/recall@1" in entry["metrics"] for entry in quiet["rounds"])


def test_words_name_the_pairs_that_say_them(ease, run: Path) -> None:
    world = World.open(Run.load(run).config)
    word = "green"
    saying = {
        pair_id
        for shard in world.shards
        for pair_id, place in zip(shard.train_ids, shard.train, strict=True)
        if any(says_all(caption, content(word)) for caption in world.evaluator.pairs.captions[place])
    }
    assert saying, "choose another word"
    for flag in ("--concept", "--class"):
        result = ease("forget", run, flag, word, "--method", "finetune", "--json")
        summary = json.loads(result.out)
        assert saying <= set(summary["request"]["ids"]) and summary["request"]["words"] == [word]
        assert summary["id"].startswith("concept-") and f"“{word}” (" in summary["meaning"]
        shown = ease("forget", run, flag, word, "--method", "finetune")
        assert f"“{word}”" in shown.out and "answered already" in shown.err
    ease("report", run, "--quiet")
    assert f"Forgetting “{word}”" in (run / "report.html").read_text()


def test_one_request_may_mix_clients_classes_words_and_ids(ease, run: Path, tmp_path: Path) -> None:
    world = World.open(Run.load(run).config)
    holding = world.server.membership.clients
    single = holding[0].train_ids[0]
    mixed = ["--client", 2, "--class", 1, "--samples", ids_file(tmp_path, single)]
    summary = json.loads(ease("forget", run, *mixed, "--method", "finetune", "--json").out)
    of_class = {e for h in holding for e, label in zip(h.train_ids, h.train_classes, strict=True) if label == 1}
    assert set(summary["request"]["ids"]) == {*holding[2].train_ids, *of_class, single}
    assert summary["meaning"].startswith("client 2, class 1, 1 single pair (")
    assert summary["id"].startswith("client-2-class-1-")
    shown = ease("forget", run, "--client", 2, "--samples", ids_file(tmp_path, single), "--name", "farewell")
    assert shown.code == 0 and (run / "requests" / "farewell" / "ease" / "record.json").is_file()
    assert ease("audit", run, "--request", "farewell", "--quick").code == 0


def test_a_name_belongs_to_one_request(ease, refused, run: Path, tmp_path: Path) -> None:
    ids = World.open(Run.load(run).config).shards[0].train_ids
    first = ["--samples", ids_file(tmp_path, ids[0]), "--name", "mine", "--method", "finetune"]
    assert ease("forget", run, *first).code == 0
    assert "answered already, 20" in ease("forget", run, *first).err
    refused(run, ["--samples", ids_file(tmp_path, ids[1]), "--name", "mine"], "--name mine: another request has this")
    refused(run, ["--client", 1, "--name", "one"], "this request is called client-1 already")
    for name in ("client-1", "class-2-3", "sample-0123456789", "../up", "", " "):
        parts = [f"--name {name!r}"] if "." in name or name == " " else [f"--name {name}"]
        if name:
            refused(run, ["--samples", ids_file(tmp_path, ids[1]), "--name", name], *parts)


def test_a_large_request_is_advised_to_retrain(ease, run: Path, tmp_path: Path) -> None:
    held = [pair_id for each in read_json(run / "membership.json")["clients"] for pair_id in each["train_ids"]]

    def advised(count: int, *options: str) -> str:
        (tmp_path / "ids.txt").write_text("\n".join(held[:count]))
        reported = ease("forget", run, "--samples", tmp_path / "ids.txt", "--dry-run", "--json", *options)
        return json.loads(reported.out)["advice"]

    quarter = len(held) // 4
    assert advised(quarter) == "" == advised(quarter + 2, "--method", "retrain")
    assert "of all pairs: --method retrain keeps the others better" in advised(quarter + 2)


def test_a_dry_run_shows_whose_pairs_go_and_changes_nothing_else(ease, run: Path, tmp_path: Path) -> None:
    before, word = fingerprint(run), "green"
    reported = json.loads(ease("forget", run, "--concept", word, "--dry-run", "--json").out)
    shown = ease("forget", run, "--concept", word, "--dry-run")
    assert shown.code == 0 and "Nothing was forgotten" in shown.out and f"“{word}”: " in shown.out
    assert sum(reported["impact"]["clients"].values()) == len(reported["ids"]) == reported["impact"]["named"]
    near = reported["matches"][0]["near_misses"]
    after = fingerprint(run)
    previews = {name for name in after if name.startswith("previews")}
    assert {name: value for name, value in after.items() if name not in previews} == before
    listed, page = map(Path, reported["files"])
    assert {f"previews/{reported['id']}/{path.name}" for path in (listed, page)} <= previews
    assert page.read_text().count("<img") == len(reported["ids"]) + len(near) and page.stat().st_mode & 0o077 == 0
    # The list can be edited and used: one line deleted, one near miss taken in.
    lines = listed.read_text().splitlines()
    assert f"# {near[0]}\t# " in listed.read_text()
    edited = [line.replace(f"# {near[0]}", near[0]) for line in lines if not line.startswith(reported["ids"][0])]
    again = ease("forget", run, "--samples", ids_file(tmp_path, *edited), "--method", "finetune", "--json")
    assert set(json.loads(again.out)["request"]["ids"]) == {*reported["ids"][1:], near[0]}


def test_one_line_comes_before_the_work(ease, run: Path) -> None:
    world = World.open(Run.load(run).config)
    count, total = len(world.shards[1].train_ids), sum(len(shard.train_ids) for shard in world.shards)
    line = ease("forget", run, "--client", 1, "--method", "finetune").err.splitlines()[0]
    assert line.startswith(f"forgetting {count} of {total} training pairs, client 1; of client 1 ({count}); e.g. “")
    assert "; about " in line and ease("forget", run, "--client", 1, "--method", "finetune", "--quiet").err == ""


def test_a_closed_request_is_said_to_be_closed(ease, run: Path) -> None:
    assert ease("forget", run, "--client", 1, "--method", "finetune", "--quiet").code == 0
    assert ease("release", run, "--request", "client-1/finetune").code == 0
    again = ease("forget", run, "--client", 1, "--method", "not")
    assert again.code == 0 and again.err.startswith("client 1 is closed already; it is answered once more, from")
    assert ease("forget", run, "--client", 1, "--method", "not").err.startswith("answered already, 20")


def test_training_continues_after_a_request(ease, run: Path) -> None:
    assert ease("forget", run, "--client", 1, "--quiet").code == 0
    for lock in ("--lock", "--no-lock"):
        result = ease("train", "--resume", run, "--after", "client-1", "--rounds", 2, lock, "--json")
        assert result.code == 0 and result.err == ""
        record = json.loads(result.out)
        assert record["locked"] is (lock == "--lock")
        assert ["forget/recall@1" in entry["metrics"] for entry in record["rounds"]] == [True, True]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--after", "client-1"], ["--resume RUN goes with"]),
        (["--resume", "RUN"], ["--until", "--after"]),
        (["--resume", "RUN", "--after", "client-1", "--set", "seed=1"], ["--resume RUN goes with"]),
        (["--resume", "RUN", "--until", "3", "--no-lock"], ["--until", "--after"]),
        (["--resume", "RUN", "--until", "3", "--after", "client-1"], ["--until", "--after"]),
        (["--resume", "RUN", "--until", "1"], ["--until 1", "has 2 rounds"]),
        (["--resume", "RUN", "--after", "client-1"], ["client-1: no finished request", "finished: none"]),
        (["--resume", "RUN", "--after", "client-1", "--rounds", "0"], ["--rounds"]),
        (["--resume", "RUN/nowhere", "--after", "client-1"], ["no run here"]),
    ],
)
def test_going_on_from_nothing_is_refused(ease, run: Path, arguments: list[str], parts: list[str]) -> None:
    before = fingerprint(run)
    result = ease("train", *(word.replace("RUN", str(run)) for word in arguments))
    assert result.code == 2 and result.out == "" and result.err.count("\n") == 1
    assert all(part in result.err for part in parts), result.err
    assert fingerprint(run) == before


# --- mistakes ---


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--client", "7"], ["--client 7: no such client", "clients 0 to 2"]),
        (["--client", "-1"], ["--client -1: no such client"]),
        (["--client", "one"], ["--client", "one"]),
        (["--class", "9"], ["--class 9: no such pseudo-class", "0 to 2"]),
        ([], ["name what to forget with --client, --concept, --class, --samples or --canaries"]),
        (["--client", "1", "--canaries"], ["--canaries is a separate request"]),
        (["--client", "1", "--threshold", "0.3"], ["--threshold says how near pairs must be"]),
        (["--concept", ""], ["--concept '': there are no words"]),
        (["--class", ""], ["--concept '': there are no words"]),
        (["--concept", "aardvark"], ["--concept 'aardvark': no caption has “aardvark”", "use such words"]),
        (["--client", "1", "--class", "9"], ["--class 9: no such pseudo-class"]),
        (["--client", "0", "--client", "1", "--client", "2"], ["names all training data"]),
        (["--class", "0", "--class", "1", "--class", "2"], ["names all training data"]),
        (["--client", "1", "--method", "magic"], ["--method magic: unknown method", ", ".join(sorted(METHODS))]),
        (["--client", "1", "--set", "shar=1"], ["shar: unknown key", "known keys here", "share"]),
        (["--client", "1", "--set", "delta=1"], ["method ease: delta: unknown key"]),
        (["--client", "1", "--set", "replay=1.5"], ["replay: input should be less than or equal to 1 (got 1.5)"]),
        (["--client", "1", "--set", "replay=-0.5"], ["replay: input should be greater than 0"]),
        (["--client", "1", "--set", "replay=often"], ["replay: input should be"]),
        (["--client", "1", "--set", "share"], ["write it as key=value"]),
        (["--client", "1", "--method", "ease_paper", "--set", "alpha=2"], ["alpha = 2", "cannot contract"]),
        (["--samples", "nowhere.txt"], ["--samples nowhere.txt: cannot be read", "one a line"]),
    ],
)
def test_a_wrong_request_is_one_line_and_changes_nothing(refused, run: Path, arguments, parts) -> None:
    refused(run, arguments, *parts)


@pytest.mark.parametrize("command", [["forget"], ["forget", "--dry-run"], ["request", "add"]], ids=" ".join)
@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--concept", ""], "there are no words"),
        (["--concept", "boat", "--client", "one"], "--client one: no such client"),
        (["--client", "7"], "clients 0 to 2"),
        (["--class", "9"], "no such pseudo-class"),
        (["--samples", "nowhere.txt"], "cannot be read"),
        ([], "name what to forget"),
    ],
)
def test_a_wrong_request_costs_no_look_at_the_data(
    ease, run: Path, monkeypatch, command: list[str], arguments: list[str], part: str
) -> None:
    """With many photographs the look takes minutes."""
    monkeypatch.setattr(World, "open", lambda *_: pytest.fail("the data were opened"))
    verb = 2 if command[0] == "request" else 1
    result = ease(*command[:verb], run, *command[verb:], *arguments)
    assert result.code == 2 and part in result.err and result.err.count("\n") == 1


def test_an_answer_that_is_there_gets_no_bar(ease, run: Path) -> None:
    """It would stay at none of its rounds."""
    assert ease("forget", run, "--client", 1, "--method", "finetune").code == 0
    again = ease("forget", run, "--client", 1, "--method", "finetune")
    assert "answered already" in again.out and "finetune  " not in again.err


def test_a_single_photo_is_forgotten(ease, run: Path, tmp_path: Path) -> None:
    """Its recall is measured among test pairs: alone it would always be found."""
    one = World.open(Run.load(run).config).shards[1].train_ids[0]
    result = ease("forget", run, "--samples", ids_file(tmp_path, one), "--json", "--quiet")
    assert result.code == 0, result.err
    metrics = json.loads(result.out)["metrics"]
    assert metrics["gallery"] >= 20
    assert metrics["retain/recall@10"] > metrics["test/recall@10"] > 0


def test_a_wrong_list_of_samples_is_one_line(refused, run: Path, tmp_path: Path) -> None:
    world = World.open(Run.load(run).config)
    known = world.shards[0].train_ids[0]
    refused(run, ["--samples", ids_file(tmp_path, known, "nobody")], "1 of 2 ids", "not pairs of this run", "'nobody'")
    refused(run, ["--samples", ids_file(tmp_path, "", "  ")], "holds no id; write one id a line")
    (tmp_path / "ids.txt").write_bytes(b"\xff\xfe\x00\x80")
    refused(run, ["--samples", tmp_path / "ids.txt"], "cannot be read as a list of ids")
    refused(run, ["--samples", tmp_path], "cannot be read as a list of ids")
    everyone = [pair_id for shard in world.shards for pair_id in shard.train_ids]
    refused(run, ["--samples", ids_file(tmp_path, *everyone)], "names all training data")


def test_a_client_that_never_took_part_is_one_line(refused, small, tmp_path: Path) -> None:
    config = load_config(None, (*small, "training.participation=0.34", "partition.validation_share=0.3"))
    train_run(config, tmp_path / "run", quiet=True)
    drawn = {client for number in (1, 2) for client in participants([0, 1, 2], config.training, config.seed, number)}
    absent = min({0, 1, 2} - drawn)
    parts = (f"client {absent}: it never took part", "nothing to forget")
    refused(tmp_path / "run", ["--client", absent], *parts)


UPDATE, STATE = "rounds/00001/updates.bin", "rounds/00002/state.safetensors"


@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing"])
@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("ease", UPDATE),
        ("ease", STATE),
        ("ease", "initial.safetensors"),
        ("retrain", "initial.safetensors"),
        ("finetune", STATE),
    ],
)
def test_a_damaged_history_is_one_line(refused, run: Path, method: str, damage: str, name: str) -> None:
    """Of a round's updates EASE reads that of the client that leaves; the last client's lies at the end."""
    faults.damage(run / name, damage)
    said = "missing from the history" if damage == "missing" else "damaged"
    refused(run, ["--client", "2", "--method", method], name, said, "restore it or train again")


def test_a_damaged_record_of_a_round_is_one_line(refused, run: Path) -> None:
    record = run / "rounds" / "00001" / "round.json"
    record.write_text(record.read_text()[:-40])
    refused(run, ["--client", "1"], "rounds/00001/round.json", "damaged")
    record.unlink()
    refused(run, ["--client", "1"], "nothing is trained here yet")


@pytest.mark.parametrize("damage", ["flipped", "of another round"])
def test_a_damaged_early_state_is_refused_before_it_is_used(ease, refused, run: Path, damage: str) -> None:
    """A class request replays round 2 from it. A client request reads only the states at both ends of the training."""
    path = run / "rounds/00001/state.safetensors"
    if damage == "flipped":
        faults.flip(path)
    else:  # whole, and its seal with it
        shutil.copy(run / "rounds/00002/state.safetensors", path)
    refused(run, ["--class", "1"], "rounds/00001/state.safetensors", "damaged", "restore it or train again")
    assert ease("forget", run, "--client", 1, "--quiet").code == 0


def test_damage_of_a_retained_clients_update_does_not_concern_a_client_that_leaves(ease, refused, run: Path) -> None:
    """What the rounds did stands in the states. The other client cannot leave, though, and stored means need all."""
    path = run / "rounds/00002/updates.bin"
    faults.flip(path)  # the update of client 2
    assert ease("forget", run, "--client", 1, "--quiet").code == 0
    said = ("rounds/00002/updates.bin", "damaged", "(client 2)", "restore it or train again")
    refused(run, ["--client", "2"], *said)
    result = ease("forget", run, "--client", 0, "--method", "fed_eraser", "--quiet")
    assert result.code == 2 and all(part in result.err for part in said)


def test_a_training_that_stopped_early_serves_requests_from_its_last_round(ease, small, tmp_path: Path) -> None:
    config = load_config(None, small)
    run = Run.create(tmp_path / "run", config)
    rounds = run.train(World.open(config))
    next(rounds)
    rounds.close()
    forgotten = ease("forget", run.folder, "--client", 1, "--quiet")
    assert forgotten.code == 0 and "stopped after round 1 of 2; using round 1" in forgotten.err
    assert ease("export", run.folder, "--quiet").code == 0
    continued = ease("train", "--resume", run.folder, "--until", 2, "--quiet")
    assert continued.code == 0, continued.err
    (release,) = run.head.releases  # the answer is what the training goes on from
    assert release.after_round == 1 and run.history.rounds() == 2
    assert run.history.start_path(2) == run.model_path(release) and 1 not in run.history.clients(2)


def test_more_rounds_that_failed_block_neither_the_queue_nor_exports(ease, run: Path) -> None:
    """They leave a configuration that names more rounds than there are."""

    def failing(*_: object, **__: object) -> None:
        raise UserError("two sites are down")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ease.runs.run.train", failing)
        assert ease("train", "--resume", run, "--until", 4, "--quiet").code == 2
    assert Run.load(run).config.training.rounds == 4 and Run.load(run).history.rounds() == 2
    added = ease("request", "add", run, "--client", 1, "--by", "dpo", "--approve", "--quiet")
    assert added.code == 0, added.err
    worked = ease("work", run, "--quiet")
    assert worked.code == 0 and "using round 2" in worked.err
    assert [each.after_round for each in Run.load(run).head.releases] == [2]
    assert ease("export", run, "--quiet").code == 0


def test_rounds_before_a_release_may_not_be_missing(ease, refused, run: Path) -> None:
    """An older round contains what the release has forgotten."""
    assert ease("forget", run, "--client", 1, "--quiet").code == 0
    assert ease("release", run, "--request", "client-1").code == 0
    shutil.rmtree(run / "rounds/00002")
    refused(run, ["--client", "2"], "rounds before the release of client-1/ease are missing", "restore them")


def test_a_folder_that_is_not_a_run_is_one_line(refused, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    refused(tmp_path, ["--client", "1"], "no run here", "run.json is missing")
    refused(tmp_path / "nowhere", ["--client", "1"], "no run here")
    refused(tmp_path / "thesis.tex", ["--client", "1"], "no run here")
    (tmp_path / "run.json").write_text("{}")
    refused(tmp_path, ["--client", "1"], "it has no seal")


def test_no_held_out_pairs_are_needed(ease, small, tmp_path: Path) -> None:
    train_run(load_config(None, (*small, "partition.validation_share=0")), tmp_path / "run", quiet=True)
    result = ease("forget", tmp_path / "run", "--class", "1")
    assert result.code == 0 and "3 clients replayed 2 rounds" in result.out
    record = json.loads((tmp_path / "run" / "requests" / "class-1" / "ease" / "record.json").read_text())
    share = share_prior(ClassRequest(classes=(1,)), "sgd", final_loss(trained_of(Run.load(tmp_path / "run"))))
    assert record["rounds"][0]["contribution"] == {"share": share, "replayed_rounds": 2, "replaying_clients": 3}


def test_the_papers_algorithm_prints_its_spectrum(ease, run: Path) -> None:
    result = ease("forget", run, "--client", 1, "--method", "ease_paper")
    assert result.code == 0
    for part in ("Entanglement of forget updates with retained updates", "unique", "eta_f", "eta_r", "projector.0"):
        assert part in result.out, result.out
    assert "reference: trained, delta: 0.3" in result.out and "subtracted" not in result.out


@pytest.mark.parametrize("kind", ["client", "class", "samples"])
def test_the_papers_algorithm_serves_every_kind_of_request(ease, run: Path, tmp_path: Path, kind: str) -> None:
    """It finishes, counts its bytes, and the same command again prints the same result."""
    chosen = [pair_id for shard in World.open(Run.load(run).config).shards for pair_id in shard.train_ids[:3]]
    asked = {"client": 1, "class": 1, "samples": ids_file(tmp_path, *chosen)}[kind]
    words = ("forget", run, f"--{kind}", asked, "--method", "ease_paper", "--set", "reference=initial", "--json")
    result = ease(*words)
    assert result.code == 0, result
    summary = json.loads(result.out)
    assert summary["method"]["method"] == "ease_paper" and summary["method"]["reference"] == "initial"
    assert min(summary["metrics"][f"cost/bytes_{way}"] for way in ("up", "down")) > 0
    assert json.loads(ease(*words).out) == summary


def test_a_damaged_answer_in_the_journal_is_one_line(refused, ease, run: Path, monkeypatch) -> None:
    answers = Sequential.run

    def stop(self, params, job, clients):
        if job.round == 1:  # the first round of recovery, after replays
            raise KeyboardInterrupt
        yield from answers(self, params, job, clients)

    monkeypatch.setattr(Sequential, "run", stop)
    result = ease("forget", run, "--class", 1)
    assert result.code == 130 and "run the same command again" in result.err
    monkeypatch.setattr(Sequential, "run", answers)
    answer = sorted(run.glob("requests/*/*/journal/*"))[-1]
    whole = answer.read_bytes()
    answer.write_bytes(whole[:-10])
    refused(run, ["--class", "1", "--quiet"], answer.name, "damaged", "delete it and run the same command again")
    answer.unlink()
    assert ease("forget", run, "--class", 1, "--quiet").code == 0


# --- the demo ---


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["client", "class", "sample"])
def test_the_demo_prints_one_object_with_every_row(ease, small, scenario: str) -> None:
    tiny = settings(*small, "partition.validation_share=0.3", "data.train=90")
    result = ease("demo", "--json", "--scenario", scenario, *tiny)
    assert result.code == 0 and result.err == "" and result.out.count("\n") == 1
    shown = json.loads(result.out)
    assert list(shown) == ["training", "rows", "contribution", "page"] and Path(shown["page"]).is_file()
    trained, exact = "projectors and adapters", "closed form"
    expected = [(trained, method) for method in ("trained", "retrain", "finetune", "ease")]
    expected += [(exact, method) for method in ("trained", "retrain", "exact")]
    assert [(row["model"], row["method"]) for row in shown["rows"]] == expected
    keys = {f"{name}/recall@1" for name in ("forget", "retain", "test")}
    keys |= {"rho", "cost/bytes_up", "cost/bytes_down", "cost/seconds"}
    for row in shown["rows"]:
        assert row.keys() == {"scenario", "model", "method", "seed", "metrics"}
        assert row["scenario"] == scenario and row["seed"] == 0
        assert keys <= row["metrics"].keys() and all(isinstance(row["metrics"][key], int | float) for key in keys)
        assert all(0 <= row["metrics"][key] <= 100 for key in keys if "recall" in key)
        if row["method"] != "exact":  # the server keeps a leaving client's sums and asks nobody
            assert all(row["metrics"][key] > 0 for key in ("cost/bytes_up", "cost/bytes_down"))
    for model in (trained, exact):
        by_name = {row["method"]: row["metrics"] for row in shown["rows"] if row["model"] == model}
        assert by_name["retrain"]["rho"] == 0 and by_name["trained"]["rho"] == 1
    same = {name: value for name, value in by_name["retrain"].items() if "recall" in name or name == "rho"}
    assert same.items() <= by_name["exact"].items(), "an exact answer is the retrained model"


@pytest.mark.slow
def test_the_demo_shows_people_the_same(ease, small, tmp_path: Path) -> None:
    result = ease("demo", "--out", tmp_path / "run", *settings(*small))
    assert result.code == 0
    for part in ("gap", "rho", "retrain", "finetune", "ease", "of the forget contribution", "retrain*", "exact*"):
        assert part in result.out, result.out
    assert result.err
