"""The command line as a user meets it: results, one-line errors, exit codes, and a plug pulled at any moment."""

import io
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from benchmarks import shared_machine
from PIL import Image

from ease.cli import commands, main
from ease.cli.registry import summaries
from ease.data.scenes import lexicon
from ease.errors import UserError

EASE = Path(sys.executable).parent / "ease"


def settings(*assignments: str) -> list[str]:
    return [word for assignment in assignments for word in ("--set", assignment)]


def is_one_line(result, *parts: str) -> bool:
    """Exit code 2, nothing on standard output, one line on the error stream that holds all parts."""
    assert result.code == 2, result
    assert result.out == ""
    assert result.err.startswith("error: ") and result.err.count("\n") == 1 and result.err.endswith("\n"), result.err
    assert "Traceback" not in result.err
    for part in parts:
        assert part in result.err, result.err
    return True


# --- what a command gives ---


def test_json_is_exactly_one_object(ease, small, tmp_path: Path) -> None:
    result = ease("train", "--out", tmp_path / "run", "--json", *settings(*small))
    assert result.code == 0 and result.err == ""
    assert result.out.count("\n") == 1
    summary = json.loads(result.out)
    assert summary["rounds"] == 2 and summary["run"] == str(tmp_path / "run")
    assert 0 <= summary["metrics"]["seen/recall@1"] <= 100
    again = ease("train", "--out", tmp_path / "run", "--json", *settings(*small))
    assert again.code == 0 and json.loads(again.out) == summary


def test_tables_go_to_standard_output_and_progress_does_not(ease, small, tmp_path: Path) -> None:
    loud = ease("train", "--out", tmp_path / "run", *settings(*small))
    assert loud.code == 0
    assert "training pairs" in loud.out and "held-out pairs" in loud.out and "chance" in loud.out
    assert "training" not in loud.out.splitlines()[0] and "2/2" in loud.err and "unseen R@1" in loud.err
    quiet = ease("train", "--out", tmp_path / "quiet", "--quiet", *settings(*small))
    assert quiet.err == "" and "training pairs" in quiet.out


def test_a_configuration_file_and_settings_go_together(ease, small, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("seed = 5\n[training]\nrounds = 7\n")
    result = ease("train", file, "--out", tmp_path / "run", "--json", *settings(*small, "training.rounds=1"))
    assert json.loads(result.out)["rounds"] == 1
    assert "seed = 5" in (tmp_path / "run" / "config.toml").read_text()


def test_the_demo_keeps_its_run_and_a_page_and_says_where(
    ease, small, cache: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))  # torch's own folder, made by the first who needs it
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = ease("demo", *settings(*small))
    assert result.code == 0 and result.err.startswith("training in ")
    (folder,) = tmp_path.glob("ease-demo-*/run")
    pages = list(folder.rglob("*.html"))
    assert pages and str(folder) in result.out.replace("\n", "") and str(pages[0]) in result.out.replace("\n", "")
    kept = ease("demo", "--quiet", "--out", tmp_path / "run", *settings(*small))
    assert str(tmp_path / "run") in kept.out and (tmp_path / "run" / "summary.json").is_file()


def test_own_pictures_in_a_folder(ease, small, tmp_path: Path) -> None:
    pictures(tmp_path / "photos", 40)
    own = settings(*small, "data.name=folder", f"data.path={tmp_path / 'photos'}", "partition.clients=2")
    result = ease("train", "--out", tmp_path / "run", "--json", *own)
    assert result.code == 0 and json.loads(result.out)["rounds"] == 2


def pictures(folder: Path, count: int) -> list[dict]:
    """Pictures of one colour each, with captions and splits."""
    folder.mkdir(parents=True)
    entries = []
    for number in range(count):
        Image.new("RGB", (64, 64), (number * 6, 255 - number * 6, (number * 37) % 256)).save(folder / f"{number}.png")
        split = "test" if number % 5 == 0 else "train"
        words = [lexicon()[(number * step) % len(lexicon())] for step in (3, 7, 11)]  # such as the tiny tower knows
        entries.append({"image": f"{number}.png", "caption": " ".join(words), "split": split})
    (folder / "captions.jsonl").write_text("\n".join(map(json.dumps, entries)))
    return entries


# --- help ---


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["demo", "--help"]])
def test_help_works(ease, arguments) -> None:
    result = ease(*arguments)
    assert result.code == 0 and "Usage" in result.out and result.err == ""


def test_help_fits_one_screen_and_names_every_command(ease, monkeypatch) -> None:
    """24 lines of 80 columns, and the commands of a first session come first."""
    monkeypatch.setenv("COLUMNS", "80")
    lines = ease("--help").out.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    words = " ".join(lines).split()
    places = [words.index(name, 4) for name in dict.fromkeys(name.split()[0] for name in commands())]
    assert places[:5] == sorted(places)[:5]
    listed = ease("--commands").out
    assert all(f"  {name} " in listed for name in commands()) and max(map(len, listed.splitlines())) <= 80


@pytest.mark.parametrize("name", summaries())
def test_the_list_of_commands_shows_the_first_line_of_their_help(name: str) -> None:
    assert (commands()[name].help or "").splitlines()[0] == summaries()[name]


@pytest.mark.parametrize("command", commands().values(), ids=list(commands()))
def test_everything_that_can_be_given_is_explained(command: click.Command) -> None:
    """A sentence, an example that begins with the command's own name, and words for each argument and option."""
    assert command.help and re.search(r"Examples?: `ease \w+", command.help), command.help
    for each in command.params:
        words = getattr(each, "help", None)
        assert words and words.rstrip(")").endswith("."), f"{command.name}: {each.name}: {words!r}"


def test_every_command_prints_json_and_shows_tracebacks_on_demand() -> None:
    """As the README says; `server` and `up` keep running and print no result."""
    for option, lacking in (("--json", {"server", "up"}), ("--debug", set())):
        found = {name for name, each in commands().items() if not any(option in one.opts for one in each.params)}
        assert found == lacking, option


def test_no_arguments_show_the_help(ease) -> None:
    result = ease()
    assert result.code == 2 and "Usage" in result.out + result.err


@pytest.mark.parametrize("words", [["--help"], ["forget", "--help"], ["request", "add", "--help"]], ids=str)
def test_help_loads_no_library(words: list[str]) -> None:
    code = (
        f"import sys; sys.argv = ['ease', *{words}]\nfrom ease.cli import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "sys.exit(not {'torch', 'numpy', 'pydantic', 'sklearn', 'starlette', 'uvicorn'}.isdisjoint(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


@pytest.mark.parametrize(("given", "policy"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "active"}, "active")])
def test_waiting_threads_do_not_spin_unless_asked_to(given: dict[str, str], policy: str) -> None:
    """OpenMP reads the policy when torch is loaded, so it must be set before."""
    code = (
        "import os, sys; sys.argv = ['ease', '--help']\nfrom ease.cli import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        f"sys.exit('torch' in sys.modules or os.environ['OMP_WAIT_POLICY'] != {policy!r})"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"} | given
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment).returncode == 0


@pytest.mark.slow
def test_processor_time_next_to_busy_processes_stays_bounded(tmp_path: Path) -> None:
    (_, _, alone), (_, _, beside) = shared_machine.survey(shared_machine.QUICK, (0, 4), (2,))
    assert beside.processor < shared_machine.MOST * alone.processor


# --- mistakes ---


@pytest.mark.parametrize(
    ("assignment", "parts"),
    [
        ("training.round=2", ("--set", "training.round", "unknown key", "known keys here", "rounds")),
        ("training.rounds=0", ("--set", "training.rounds", "greater than or equal to 1")),
        ("partition.scheme=odd", ("partition.scheme", "'iid', 'dirichlet', 'uniform', 'sites' or 'on_site'")),
        ("model.lora_rank=0", ("model.lora_rank", "greater than or equal to 1")),
        ("model.lora_rank=129", ("model.lora_rank = 129", "choose 1..128")),
        ("partition.clients=31", ("partition.clients = 31", "60 pairs", "use fewer clients or more data")),
        ("partition.classes=61", ("partition.classes = 61", "60 training pairs", "lower it")),
        ("data.path", ("--set data.path", "write it as key=value")),
        ("[red]=1", ("[red]", "unknown key")),
        ("device=cuda", ("cuda",)),
        ("training.learning_rate=1e308", ("training.learning_rate", "less than or equal to 1000000")),
        ("training.learning_rate=inf", ("training.learning_rate", "finite number")),
        ("training.learning_rate=nan", ("training.learning_rate", "finite number")),
        ("model.temperature=-inf", ("model.temperature", "finite number")),
        ("training.rounds=" + "9" * 5000, ("training.rounds",)),
        ("seed=" + "9" * 4000, ("seed", "a number beyond 2^63")),
        ("data.train=[[1, 99999999999999999999]]", ("data.train", "a number beyond 2^63")),
        ("data.name=" + "[" * 50_000, ("data.name",)),
        ("\x1b[31m\u202e=1", (r"\x1b[31m\u202e", "unknown key")),
        ("data.path=\udcff", ("data.path", "half a character")),
    ],
)
def test_a_wrong_setting_is_one_line(ease, small, tmp_path: Path, assignment: str, parts, monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = ease("train", "--out", tmp_path / "run", *settings(*small, "model.lora=ffa", assignment))
    assert is_one_line(result, *parts)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (None, ("c.toml", "no such file")),
        ("rounds = ", ("c.toml", "not valid TOML")),
        ("[training]\nround = 1", ("c.toml", "training.round", "unknown key")),
        ("[model]\nlora = 'big'", ("c.toml", "model.lora", "'ffa', 'full' or 'off'")),
        ("a = " + "[" * 50_000, ("c.toml", "not valid TOML")),
        ("seed = " + "9" * 5000, ("c.toml", "not valid TOML")),
        ("seed = " + "9" * 30, ("c.toml", "seed", "a number beyond 2^63")),
        ("x = 1\n" * 200_000, ("c.toml", "more than 1,048,576 bytes")),
        ("x = '\x1b[31m'", ("c.toml", "not valid TOML")),
    ],
)
def test_a_wrong_file_is_one_line(ease, tmp_path: Path, content: str | None, parts) -> None:
    if content is not None:
        (tmp_path / "c.toml").write_text(content)
    assert is_one_line(ease("train", tmp_path / "c.toml", "--out", tmp_path / "run"), *parts)
    assert not (tmp_path / "run").exists()


def spoil(folder: Path, how: str) -> tuple[str, ...]:
    """Damage a good data folder; returns what the error must say."""
    if how == "missing":
        return str(folder.parent / "gone"), "no such folder"
    entries = pictures(folder, 40)
    captions = folder / "captions.jsonl"
    if how == "empty":
        for path in folder.iterdir():
            path.unlink()
        return str(captions), "no such file", "write one line per image"
    if how == "unreadable":
        captions.unlink()
        captions.mkdir()
        return str(captions), "is a folder"
    if how == "no pairs":
        captions.write_text("\n")
        return str(folder), "no images listed"
    if how == "corrupt image":
        (folder / "3.png").write_bytes((folder / "3.png").read_bytes()[:60])
        return str(folder / "3.png"), "cannot read 1 of 40 images", "data.strict = false"
    del entries[6]["caption"]
    if how == "caption not text":
        entries[6]["caption"] = 17
    captions.write_text("\n".join(map(json.dumps, entries)))
    return str(captions), "line 7", "a caption must be text" if how == "caption not text" else "needs either"


@pytest.mark.parametrize(
    "how",
    ["missing", "empty", "unreadable", "no pairs", "corrupt image", "caption missing", "caption not text"],
)
def test_wrong_data_is_one_line_and_leaves_nothing(ease, small, tmp_path: Path, how: str, monkeypatch) -> None:
    monkeypatch.setenv("EASE_CACHE", str(tmp_path / "cache"))
    parts = spoil(tmp_path / "photos", how)
    place = tmp_path / ("gone" if how == "missing" else "photos")
    own = settings(*small, "data.name=folder", f"data.path={place}", "data.strict=true")
    assert is_one_line(ease("train", "--out", tmp_path / "run", *own), *parts)
    assert not (tmp_path / "run").exists()
    kept = {path.suffix for path in (tmp_path / "cache").rglob("*") if path.is_file()}
    # What was decoded need not be decoded again, and a file lists what could not be.
    assert kept == ({".npy", ".json", ".txt"} if how == "corrupt image" else set())


def test_a_wrong_place_is_one_line(ease, small, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    assert is_one_line(ease("train", "--out", tmp_path / "file", *settings(*small)), "file: is a file", "--out")
    assert is_one_line(ease("train", "--out", tmp_path, *settings(*small)), "is not empty and holds no run")
    assert is_one_line(ease("train", "--out", tmp_path / "file" / "run", *settings(*small)), "file")
    assert is_one_line(ease("train", *settings(*small)), "--out: name the run directory")
    assert (tmp_path / "file").read_text() == "mine" and len(list(tmp_path.iterdir())) == 1


def test_another_configuration_or_a_damaged_history_is_one_line(ease, small, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert ease("train", "--out", run, "--quiet", *settings(*small)).code == 0
    other = ease("train", "--out", run, *settings(*small, "seed=9"))
    assert is_one_line(other, str(run), "seed is 0 there and 9 here", "choose another --out")
    state = run / "rounds" / "00001" / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-9])
    damaged = ease("train", "--out", run, *settings(*small))
    assert is_one_line(damaged, str(state), "damaged", "restore it or train again")


def test_a_full_disk_is_one_line(ease, small, small_disk, monkeypatch) -> None:
    disk = small_disk(64)
    assert is_one_line(
        ease("train", "--quiet", "--out", disk / "run", *settings(*small)), "No space left", "free some space"
    )
    monkeypatch.setenv("EASE_CACHE", str(disk / "cache"))
    assert is_one_line(ease("train", "--out", disk / "other", *settings(*small)), "No space left", "free some space")
    assert not (disk / "other").exists()


@pytest.mark.parametrize("arguments", [["train", "--rounds", "3"], ["trian"], ["train", "a", "b"]])
def test_a_wrong_word_is_one_line(ease, arguments) -> None:
    assert is_one_line(ease(*arguments))


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["trian"], "train"),
        (["request", "ad", "runs/first"], "add"),
        (["certificate", "sgn", "certificate.json"], "sign"),
        (["train", "--ouut", "x"], "--out"),
        (["train", "--out", "x", "--set", "training.round=2"], "rounds"),
        (["train", "--out", "x", "--set", "rounds=2"], "training.rounds"),
        (["forget", "x", "--client", "1", "--method", "fintune"], "finetune"),
        (["forget", "x", "--client", "1", "--set", "reply=1"], "replay"),
    ],
)
def test_a_near_name_is_suggested_once(ease, arguments: list[str], meant: str) -> None:
    result = ease(*arguments)
    assert is_one_line(result, meant)
    assert result.err.lower().count("did you mean") == 1


def test_unlike_words_get_no_suggestion(ease) -> None:
    assert "did you mean" not in ease("zzz").err.lower()


# --- completion ---


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("ease tr", {"train"}),
        ("ease request a", {"add", "approve"}),
        ("ease certificate s", {"sign"}),
        ("ease export runs/first --fo", {"--format"}),
        ("ease export runs/first --format o", {"onnx"}),
    ],
)
def test_a_shell_completes(ease, monkeypatch, line: str, words: set[str]) -> None:
    """What the script that `--show-completion` prints asks for."""
    asked = {"_EASE_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    result = ease()
    assert set(result.out.split()) == words and result.err == ""


def test_the_message_is_printed_as_it_is(ease, tmp_path: Path) -> None:
    """Square brackets are no markup, and long lines are not broken."""
    name = tmp_path / ("[bold]x[/]" + "y" * 150) / "c.toml"
    assert is_one_line(ease("train", name, "--out", tmp_path / "run"), f"{name}: no such file")


@pytest.mark.parametrize("content", ["[" * 100_000, '{"format": ' + "9" * 5000 + "}", "[]", '{"a": "\\ud800"}', ""])
def test_a_run_that_is_none_is_one_line(ease, tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_text(content)
    assert is_one_line(ease("forget", tmp_path, "--client", "1"), str(tmp_path / "run.json"))


def test_a_number_of_a_client_may_have_any_length(ease, small, tmp_path: Path) -> None:
    assert ease("train", "--out", tmp_path / "run", "--quiet", *settings(*small)).code == 0
    assert is_one_line(ease("forget", tmp_path / "run", "--client", "9" * 5000), "no such client")


@pytest.mark.parametrize("more", [[], ["--markdown"]], ids=str)
def test_a_terminal_that_knows_few_letters_is_shown_question_marks(monkeypatch, more: list[str]) -> None:
    """`±`, `·` and lines of tables are no ASCII."""
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")  # strict, as Python opens it
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "argv", ["ease", "methods", *more])
    with pytest.raises(SystemExit) as ended:
        main()
    terminal.flush()
    shown = terminal.buffer.getvalue()  # type: ignore[attr-defined]
    assert ended.value.code == 0 and shown.isascii() and (b"?" in shown) == bool(more)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("can't start new thread"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        SystemError("<built-in function exec_builtin> returned a result with an exception set"),
        SystemError("error return without exception set"),
    ],
)
def test_too_little_memory_is_one_line(ease, monkeypatch, tmp_path: Path, error: Exception) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("ease.commands.train.train_run", fail)
    assert is_one_line(ease("train", "--out", tmp_path / "run"), "not enough memory", "ulimit -v")


@pytest.mark.slow
@pytest.mark.parametrize("megabytes", [300, 700, 1000, 1150, 1300])
def test_a_limit_of_memory_is_one_line_or_enough(small, tmp_path: Path, megabytes: int) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))

    arguments = ["train", "--quiet", "--out", str(tmp_path / "run"), *settings(*small)]
    command = [sys.executable, "-c", "from ease.cli import main; main()", *arguments]
    environment = {**os.environ, "EASE_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit, env=environment)
    assert "Traceback" not in result.stderr
    assert result.returncode == 0 or (result.returncode == 2 and result.stderr.splitlines()[-1].startswith("error: "))


def test_debug_shows_the_traceback(monkeypatch) -> None:
    """What ends the program is the error itself, of which Python prints the way it came."""
    wrong = ["train", "--out", "/dev/null/run", "--debug", "--set", "training.rounds=0"]
    monkeypatch.setattr(sys, "argv", ["ease", *wrong])
    with pytest.raises(UserError, match=r"training\.rounds"):
        main()


def test_a_fault_of_our_own_is_not_a_user_error(ease, monkeypatch, tmp_path: Path) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr("ease.commands.train.train_run", fail)
    monkeypatch.setattr(sys, "argv", ["ease", "train", "--out", str(tmp_path / "run")])
    with pytest.raises(ZeroDivisionError, match="ours"):
        main()


def test_an_interruption_by_hand_is_one_line(ease, monkeypatch, tmp_path: Path) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ease.commands.train.train_run", interrupt)
    result = ease("train", "--out", tmp_path / "run")
    assert result.code == 130 and "run the same command again to continue" in result.err
    assert "Traceback" not in result.err


# --- the plug is pulled ---

LONG = ("training.rounds=8", "training.local_epochs=3")


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def start(out: Path, small: tuple[str, ...], **environment: str) -> subprocess.Popen[bytes]:
    command = [EASE, "train", "--quiet", "--out", out, *settings(*small, *LONG)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, shared_cache: Path, small) -> tuple[Path, float]:
    """The folder of a run that nothing disturbed, and the seconds from its first file to its end."""
    out = tmp_path_factory.mktemp("uninterrupted") / "run"
    process = start(out, small, EASE_CACHE=str(shared_cache))
    wait_for(out / "run.json", process)
    started = time.monotonic()
    assert process.wait(timeout=300) == 0
    assert process.stderr is not None and process.stderr.read() == b""
    process.stderr.close()
    return out, time.monotonic() - started


def wait_for(path: Path, process: subprocess.Popen[bytes]) -> None:
    while not path.exists() and process.poll() is None:
        time.sleep(0.002)


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(6))
def test_killed_at_a_random_moment_and_resumed_it_ends_with_the_same_bytes(
    uninterrupted, small, tmp_path: Path, attempt: int
) -> None:
    expected, seconds = uninterrupted
    moments = random.Random(attempt)
    out = tmp_path / "run"
    killed = 0
    for latest in (0.15, seconds):  # the first time surely before the end, which on a fast machine is soon
        process = start(out, small)
        wait_for(out / "run.json", process)
        time.sleep(moments.uniform(0, latest))
        process.kill()
        process.communicate()
        killed += process.returncode == -signal.SIGKILL
    process = start(out, small)
    _, complaint = process.communicate(timeout=300)
    assert (process.returncode, complaint) == (0, b"")
    assert contents(out).keys() == contents(expected).keys()
    for name, content in contents(expected).items():
        if name != "summary.json":  # it names its own folder
            assert contents(out)[name] == content, name
    assert killed


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(3))
def test_killed_while_it_prepares_the_data_it_ends_with_the_same_bytes(
    uninterrupted, small, tmp_path: Path, attempt: int
) -> None:
    expected, _ = uninterrupted
    out, cache = tmp_path / "run", tmp_path / "cache"
    moments = random.Random(100 + attempt)
    process = start(out, small, EASE_CACHE=str(cache))
    wait_for(cache, process)
    time.sleep(moments.uniform(0, 0.6))
    process.kill()
    process.communicate()
    process = start(out, small, EASE_CACHE=str(cache))
    _, complaint = process.communicate(timeout=300)
    assert (process.returncode, complaint) == (0, b"")
    for name, content in contents(expected).items():
        if name.endswith(".safetensors"):
            assert contents(out)[name] == content, name


@pytest.mark.slow
def test_a_second_process_in_the_same_folder_is_refused(uninterrupted, small, tmp_path: Path) -> None:
    expected, _ = uninterrupted
    out = tmp_path / "run"
    first, second = start(out, small), None
    try:
        wait_for(out / "initial.safetensors", first)  # written by one that holds the run
        os.kill(first.pid, signal.SIGSTOP)  # so that it surely still holds the lock
        second = start(out, small)
        _, complaint = second.communicate(timeout=300)
        os.kill(first.pid, signal.SIGCONT)
        assert second.returncode == 2
        assert complaint.count(b"\n") == 1 and b"another process is working on this run" in complaint
        _, complaint = first.communicate(timeout=300)
        assert (first.returncode, complaint) == (0, b"")
    finally:
        for process in filter(None, (first, second)):
            if process.poll() is None:
                process.kill()
                process.communicate()
    name = "rounds/00008/state.safetensors"
    assert contents(out)[name] == contents(expected)[name]


def test_control_c_is_one_line_even_where_compiled_code_makes_an_error_of_it(ease, monkeypatch) -> None:
    def interrupted(**_: object) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt as error:
            raise ValueError("calling a function: KeyboardInterrupt") from error

    before = signal.getsignal(signal.SIGINT)
    try:
        monkeypatch.setattr("ease.cli.entry.program", lambda: interrupted)
        result = ease()
        assert result.code == 130 and result.err.strip() == "stopped; run the same command again to continue"
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.slow
def test_control_c_stops_a_real_run_and_it_can_be_continued(uninterrupted, small, tmp_path: Path) -> None:
    for attempt in range(5):
        out = tmp_path / f"run-{attempt}"
        process = start(out, small)
        wait_for(out / "initial.safetensors", process)
        for reported in (signal.SIGSTOP, signal.SIGINT, signal.SIGCONT):  # it cannot end before it hears the second
            process.send_signal(reported)
        _, complaint = process.communicate(timeout=300)
        if process.returncode:
            break  # else it had ended before the first, as it can where processors are busy
    assert (process.returncode, complaint) == (130, b"\nstopped; run the same command again to continue\n")
    process = start(out, small)
    process.communicate(timeout=300)
    name = "rounds/00008/state.safetensors"
    assert process.returncode == 0 and contents(out)[name] == contents(uninterrupted[0])[name]
