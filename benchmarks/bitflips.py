"""Flips single bits in copies of a run and of its cache, and counts what the commands that read them make of it.

python benchmarks/bitflips.py --flips 200

Each copy has one flipped bit, in a file drawn by lot. `detected`: refused in one line that names the file, or made
again with a line that names it and the same results. `harmless`: the same results to the byte, and nothing said.
`silent`: other results, and nothing said. `unnamed`: refused, and the file is not named. `traceback`: anything else.
"""

import argparse
import io
import json
import os
import random
import shutil
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from ease.cli import main as ease_main
from ease.errors import UserError
from ease.operations.evidence import new_key, read_log
from ease.operations.ledger.database import NAME as LEDGER
from ease.operations.ledger.store import Ledger
from ease.operations.serving.served import open_served
from ease.requests.tombstones import NAME as TOMBSTONES
from ease.requests.tombstones import Tombstones, as_json
from ease.runs.run import Run
from ease.storage import write_atomic, write_json

TINY = (
    "data.train=24",
    "data.validation=4",
    "data.test=40",
    "partition.clients=2",
    "partition.classes=2",
    "partition.scheme=iid",
    "partition.validation_share=0.2",
    "training.rounds=2",
    "training.local_epochs=1",
    "training.batch_size=8",
    "model.hidden=8",
    "model.embedding=8",
    "gallery=8",
)
AUDIT = ("audit", "run", "--request", "client-1", "--shadows", "4", "--retrains", "2", "--pool", "16", "--workers", "1")
COMMANDS: tuple[tuple[str, ...], ...] = (
    ("train", "--out", "grown", "--quiet", "--set", "training.rounds=3"),
    ("train", "--resume", "run", "--after", "client-1", "--rounds", "1", "--quiet"),
    ("export", "run", "--request", "client-1", "--quiet"),
    ("report", "run", "--quiet"),
    (*AUDIT, "--quiet"),
    ("certificate", "run", "--request", "client-1", "--out", "certificate.json"),
    ("verify", "certificate.json", "--run", "run"),
    ("request", "find", "run", "*"),
    ("forget", "run", "--samples", "ids.txt", "--quiet"),
    ("forget", "run", "--client", "0", "--method", "fed_eraser", "--quiet"),
    ("work", "run", "--set", "hold.retain_points=100", "--quiet"),
    ("forget", "grown", "--client", "0", "--quiet"),
    ("release", "grown", "--request", "client-0"),
    ("join", "grown", "--samples", "new.txt", "--consent", "yes", "--by", "ada", "--quiet"),
    ("serve", "grown"),
    ("purge", "grown", "--quiet"),
)
"""All that read a run back. `ids.txt` names the request that was interrupted, `new.txt` pairs that join; `grown` is the
run without requests. `serve` stands for what its server does when it is started and asked."""
REQUESTS = (
    ("request", "add", "run", "--client", "1", "--id", "leaves", "--approve", "--quiet"),
    ("request", "add", "run", "--client", "0", "--id", "stays", "--approve", "--quiet"),
    ("request", "cancel", "run", "stays", "--reason", "asked by mistake"),
)
"""What is in the ledger: one request that `work` releases, and one that it must not."""
MODULES = {
    "work": "requests",
    "request": "requests",
    "certificate": "evidence",
    "verify": "evidence",
    "release": "forget",
    "purge": "requests",
    "join": "joining",
}
"""Commands whose module has another name."""
OUTCOMES = ("detected", "harmless", "silent", "unnamed", "traceback")


class Told(NamedTuple):
    """What a forked process left: its exit code and what it wrote."""

    code: int
    said: str


class Flip(NamedTuple):
    file: str
    bit: int
    outcome: str
    said: str


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Work in a folder, with the cache in it."""
    place, cache = Path.cwd(), os.environ.get("EASE_CACHE")
    os.chdir(folder)
    os.environ["EASE_CACHE"] = str(folder / "cache")
    try:
        yield
    finally:
        os.chdir(place)
        os.environ.pop("EASE_CACHE")
        if cache is not None:
            os.environ["EASE_CACHE"] = cache


def end_after(work: Callable[[], object], folder: Path, said: int) -> NoReturn:
    """Do something from another folder, its words going to a file, and end this process as a command would."""
    code = 1
    try:
        for stream in (1, 2):
            os.dup2(said, stream)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")  # a test may have replaced them
        with inside(folder):
            work()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def forked(work: Callable[[], object], folder: Path) -> Told:
    """Do something in a copy of this process, which spares the imports, from another folder."""
    with tempfile.TemporaryFile() as said:
        child = os.fork()
        if child == 0:
            end_after(work, folder, said.fileno())
        _, status = os.waitpid(child, 0)
        said.seek(0)
        return Told(os.waitstatus_to_exitcode(status), said.read().decode(errors="replace"))


def command(*arguments: str) -> None:
    """One command; ends with an exit if it fails."""
    if arguments[0] == "serve":
        return answered(Path(arguments[1]))
    extra = [word for each in TINY for word in ("--set", each)] if arguments[:2] == ("train", "--out") else []
    place = arguments.index("--quiet") if extra else len(arguments)
    sys.argv = ["ease", *arguments[:place], *extra, *arguments[place:]]
    try:
        ease_main()
    except SystemExit as ended:
        if ended.code:
            raise


def answered(run: Path) -> None:
    """Open what a server serves and ask it, as a command that ends."""
    try:
        served = open_served(run, None)
        print(len(served.search("a red boat", 3, "all").hits))
    except UserError as error:
        print(f"error: {error}")
        raise SystemExit(2) from error


def build(folder: Path, audited: bool) -> None:
    """A run with two answers, perhaps an audit, a request that was killed half way, and the cache of all of them."""
    for each in {MODULES.get(each[0], each[0]) for each in (*COMMANDS, *REQUESTS)}:
        import_module(f"ease.commands.{each}")  # copies of this process have it behind them
    for each in (
        ("train", "--out", "run", "--quiet"),
        ("forget", "run", "--client", "1", "--quiet"),
        ("forget", "run", "--client", "1", "--method", "retrain", "--quiet"),
        *([(*AUDIT, "--quiet")] if audited else []),
        *REQUESTS,
    ):
        with (
            inside(folder),
            redirect_stdout(io.StringIO()),
        ):  # in this process, so that every copy of it has the imports behind it
            command(*each)
    fix_secrets(folder / "run")
    held = json.loads((folder / "run" / "membership.json").read_text())["clients"]
    ids = [pair for client in held for pair in client["train_ids"][:3]]
    (folder / "ids.txt").write_text("\n".join(ids))
    spare = json.loads((folder / "run" / "membership.json").read_text())["validation"]
    (folder / "new.txt").write_text("\n".join(spare))
    reported = forked(lambda: _killed_after(3), folder)
    assert reported.code == -9, reported.said


def _killed_after(answers: int) -> None:
    """The interrupted request: the process ends when so many answers of clients are in its journal."""
    from ease.federation import journal

    kept, write = [], journal.write_update

    def counting(*arguments: object) -> None:
        write(*arguments)  # type: ignore[arg-type]
        kept.append(1)
        if len(kept) == answers:
            os.kill(os.getpid(), 9)

    journal.write_update = counting  # type: ignore[assignment]
    command("forget", "run", "--samples", "ids.txt", "--quiet")


CLOCK = {"seal", "time", "resumed", "consent", "record", "audit", "certificate"}
"""Keys of JSON whose values depend on the clock or on being interrupted, or are hashes of files that do."""


def timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: timeless(each)
            for key, each in value.items()
            if key not in CLOCK and "seconds" not in key and "memory" not in key
        }
    return [timeless(each) for each in value] if isinstance(value, list) else value


CLOCKED = ("purge.json", "membership.json", "recipients.json")
"""Files with times in them."""
ENTRY = ("id", "request", "state", "why", "outcome")
"""What is compared of a request in the ledger."""


def reported_hash(run: Path) -> dict[str, Any]:
    """What the ledger and the log of a run say, less what depends on the clock."""
    found = dict[str, Any]()
    if (run / LEDGER).is_file():
        ledger = Ledger(run)
        entries = [timeless(each.model_dump(mode="json")) for each in ledger.entries()]
        found["ledger"] = [{name: each[name] for name in ENTRY} for each in entries]
        found["consents"] = [(each.client, each.given_by, each.text, each.pairs) for each in ledger.consents()]
    if (run / "evidence" / "head.json").is_file():
        records = read_log(Run.load(run)).records
        found["log"] = [(each.kind, timeless(_without_rewritten(each.payload))) for each in records]
    return found


def _without_rewritten(payload: dict[str, Any]) -> dict[str, Any]:
    """Hashes of records that a purge rewrote depend on the clock, as the records do; that they are there does not."""
    answers = payload.get("answers")
    if not isinstance(answers, dict):
        return payload
    return {
        **payload,
        "answers": {key: {**each, "rewritten": sorted(each["rewritten"])} for key, each in answers.items()},
    }


def fix_secrets(run: Path) -> None:
    """Make the secrets of a run, which would be drawn at random, before anything depends on them."""
    new_key(run / "evidence" / "signing.key")
    write_atomic(run / "evidence" / "salt", b"00" * 32)
    write_json(run / TOMBSTONES, as_json(Tombstones(salt="00" * 16)))


def results(folder: Path) -> dict[str, object]:
    """Every file of the runs by its bytes; records, ledger and log without what depends on the clock."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        clocked = path.name == LEDGER or path.parent.name == "evidence"
        if not path.is_file() or name.startswith("cache/") or path.name.startswith(".") or clocked:
            continue
        if path.name == "record.json":
            record = json.loads(path.read_bytes())
            timed = ("seconds", "memory")
            metrics = {key: each for key, each in record["metrics"].items() if not any(word in key for word in timed)}
            found[name] = {**record, "metrics": metrics, "resumed": None, "seal": None}
        elif path.name in CLOCKED:
            with suppress(ValueError):  # a flipped bit
                found[name] = timeless(json.loads(path.read_bytes()))
        elif name != "certificate.json":  # signed, and so with the time; `ease verify` reads it
            found[name] = path.read_bytes()
    return found | reported_hash(folder / "run")


def follow(folder: Path, audited: bool) -> Iterator[Told]:
    """What each command says, until one is refused."""
    shutil.copytree(folder / "run", folder / "grown", ignore=shutil.ignore_patterns("requests", "shadows", "*.html"))
    for each in COMMANDS if audited else (each for each in COMMANDS if each[0] != "audit"):
        reported = forked(lambda each=each: command(*each), folder)  # type: ignore[misc]
        yield reported
        if reported.code:
            return


def classify(reported: list[Told], name: str, same: bool) -> str:
    said = "".join(each.said for each in reported)
    if any(each.code not in (0, 2) for each in reported) or "Traceback" in said:
        return "traceback"
    named = Path(name).name in said
    if reported[-1].code == 2:
        return "detected" if named else "unnamed"
    if not same:
        return "silent"
    return "detected" if named else "harmless"


def survey(folder: Path, flips: int, seed: int = 0, audited: bool = True, only: str = "") -> Iterator[Flip]:
    """Flip so many bits, each in a copy of its own that lies in the same place: paths are part of what is written."""
    base, work = folder / "base", folder / "work"
    work.mkdir(parents=True)
    build(work, audited)
    shutil.copytree(work, base, symlinks=True)
    for reported in follow(work, audited):
        assert reported.code == 0, reported.said
    expected = results(work)
    files = sorted(
        path
        for path in base.rglob("*")
        if path.is_file()
        and path.stat().st_size
        and path.suffix != ".txt"
        and only in kind(path.relative_to(base).as_posix())
    )
    draw = random.Random(seed)
    for _ in range(flips):
        path = draw.choice(files)
        bit = 8 * draw.choice(places(path)) + draw.randrange(8)
        shutil.rmtree(work)
        shutil.copytree(base, work)
        flipped = work / path.relative_to(base)
        content = bytearray(flipped.read_bytes())
        content[bit // 8] ^= 1 << bit % 8
        flipped.write_bytes(content)
        name = path.relative_to(base).as_posix()
        reported = list(follow(work, audited))
        found = results(work) if reported[-1].code == 0 else {}
        for each in {name, name.replace("run/", "grown/", 1)} & expected.keys():
            # What no command wrote anew is still the flipped file, and no result.
            if (work / each).is_file() and (work / each).read_bytes() == bytes(content):
                found[each] = expected[each]
        yield Flip(name, bit, classify(reported, name, found == expected), reported[-1].said.strip())


def places(path: Path) -> Sequence[int]:
    """Bytes of a file to draw from: of the ledger, whose pages are mostly empty, those that are not zero."""
    if path.name != LEDGER:
        return range(path.stat().st_size)
    return [place for place, byte in enumerate(path.read_bytes()) if byte]


def kind(name: str) -> str:
    """Files by what they are."""
    parts = Path(name).parts
    return " ".join(filter(None, ("cache" if parts[0] == "cache" else "", _thing(parts))))


def _thing(parts: tuple[str, ...]) -> str:
    if parts[-1] == LEDGER:
        return "ledger"
    for folder in ("activations", "classes", "shadows", "journal", "rounds", "evidence"):
        if folder in parts:
            return folder
    if "requests" in parts:
        return "answers"
    return "scenes" if parts[0] == "cache" else "run"


def table(found: list[Flip]) -> str:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for each in found:
        for row in (kind(each.file), "all"):
            counts[row][each.outcome] += 1
    lines = [f"| files | flips | {' | '.join(OUTCOMES)} |", "|---" * (len(OUTCOMES) + 2) + "|"]
    for row in [*sorted(counts.keys() - {"all"}), "all"]:
        cells = " | ".join(str(counts[row][outcome]) for outcome in OUTCOMES)
        lines.append(f"| {row} | {counts[row].total()} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="flip bits in this kind of file alone, such as ledger")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for each in survey(Path(folder), args.flips, args.seed, only=args.only):
            found.append(each)
            said = "" if each.outcome in ("detected", "harmless") else each.said[-600:]
            print(f"{len(found)} {each.outcome}: {each.file}, bit {each.bit} {said}", file=sys.stderr, flush=True)
    print(table(found))
    if any(each.outcome not in ("detected", "harmless") for each in found):
        sys.exit(1)


if __name__ == "__main__":
    main()
