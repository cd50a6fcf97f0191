"""Files for deployment, read as the tools read them: every command in them parses, every path and user is there.

No container engine is needed, so none of this says that the image builds.
"""

import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest

from ease.cli import commands
from ease.federation.launch import QUIET, flower_programs

yaml = pytest.importorskip("yaml", reason="comes with the extra hf")

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
SITES = ("0", "1", "2")


def instructions() -> list[tuple[str, str]]:
    """Of the Dockerfile: each word that leads a line, and what follows it, continued lines joined."""
    text = re.sub(r"\\\n\s*", "", (DEPLOY / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines)]


def of(word: str) -> list[str]:
    return [rest for each, rest in instructions() if each == word]


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def units() -> dict[str, dict[str, list[str]]]:
    """Unit -> setting -> its values."""
    found: dict[str, dict[str, list[str]]] = {}
    for path in sorted(DEPLOY.glob("*.service")):
        table = found.setdefault(path.stem, {})
        for line in path.read_text().splitlines():
            if "=" in line and not line.startswith("#"):
                name, _, value = line.partition("=")
                table.setdefault(name, []).append(value)
    return found


def check_ease(words: list[str]) -> dict[str, Any]:
    """What the command line makes of a command; one that it does not know is an error."""
    name, *rest = words
    return commands()[name].make_context(name, rest).params


def environment(text: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in shlex.split(text))


def test_the_image_is_made_of_instructions_that_exist() -> None:
    known = {"FROM", "RUN", "COPY", "ENV", "VOLUME", "USER", "ENTRYPOINT"}
    assert {word for word, _ in instructions()} == known and instructions()[0][0] == "FROM"


def test_the_image_takes_in_what_the_page_says_to_make() -> None:
    page = (ROOT / "docs" / "deploy.md").read_text()
    for copied in of("COPY"):
        source, _ = copied.split()
        assert f"pip wheel -w {source} " in page and f"pip wheel -w {source} " in (DEPLOY / "Dockerfile").read_text()
    versions = set(re.findall(r"(flwr|torch)==([\d.]+)", (DEPLOY / "Dockerfile").read_text()))
    made = set(re.findall(r"(flwr|torch)(?:\[\w+\])?==([\d.]+)", (ROOT / "Makefile").read_text()))
    assert versions == made and len(versions) == 2
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"--find-links /wheels {project['name']} " in " ".join(of("RUN"))
    assert of("ENTRYPOINT") == ['["ease"]'] and "ease" in project["scripts"]
    python = re.search(r"python:(\d+)\.(\d+)", of("FROM")[0])
    lowest = re.search(r">=\s*(\d+)\.(\d+)", project["requires-python"])
    assert python and lowest and tuple(map(int, python.groups())) >= tuple(map(int, lowest.groups()))


def test_nothing_phones_home() -> None:
    """What `ease` sets for the programs of Flower that it starts is set where something else starts them."""
    needed = {name: value for name, value in QUIET.items() if name.startswith(("FLWR_", "UV_"))}
    image = {name: value for text in of("ENV") for name, value in environment(text).items()}
    unit = environment(units()["flower-supernode"]["Environment"][0])
    for found in (image, unit):
        assert {name: found.get(name) for name in needed} == needed


def test_variables_are_ones_that_the_code_reads() -> None:
    code = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    own = [environment(text) for text in (*of("ENV"), *(each["Environment"][0] for each in units().values()))]
    named = {name for each in own for name in each if name.startswith("EASE_")}
    assert named == {"EASE_FLOWER", "EASE_CACHE"} and all(f'"{name}"' in code for name in named)


def test_every_command_of_the_units_parses() -> None:
    for name, unit in units().items():
        program, *words = shlex.split(unit["ExecStart"][0])
        if name != "flower-supernode":
            assert program == "/opt/ease/bin/ease"
            check_ease(words)
    node = check_ease(shlex.split(units()["ease-node"]["ExecStart"][0])[1:])
    flower = units()["flower-supernode"]
    assert f'socket="{node["socket"]}"' in flower["ExecStart"][0] and flower["SupplementaryGroups"] == [node["group"]]
    assert units()["ease-node"]["User"] != flower["User"]
    hidden = [each.removeprefix("-") for each in flower["InaccessiblePaths"][0].split()]
    assert str(node["data"]) in hidden and any(Path(node["folder"]).is_relative_to(each) for each in hidden)


def analyse(*words: str) -> str:
    """What systemd-analyze says; skipped where there is none."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze on this machine")
    done = subprocess.run(["systemd-analyze", *words], capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr


@pytest.mark.parametrize("name", sorted(path.name for path in DEPLOY.glob("*.service")))
def test_units_are_exposed_little(name: str) -> None:
    """systemd's own score, from 0 (safe) to 10."""
    said = analyse("security", "--offline=true", "--no-pager", str(DEPLOY / name))
    score = re.search(r"Overall exposure level for \S+: ([\d.]+)", said)
    assert score is not None and float(score[1]) < 4, said[-300:]


@pytest.mark.parametrize(
    "path", sorted([*DEPLOY.glob("*.service"), *DEPLOY.glob("*.timer")]), ids=lambda path: path.name
)
def test_systemd_understands_every_setting_of_a_unit(path: Path) -> None:
    """All that it may miss here are the programs, which are installed by whoever deploys."""
    said = [line for line in analyse("verify", "--man=no", str(path)).splitlines() if path.name in line]
    assert [line for line in said if "is not executable" not in line] == []


def test_users_and_folders_of_the_units_are_made() -> None:
    made = (DEPLOY / "ease.sysusers.conf").read_text()
    for name, unit in units().items():
        assert re.search(rf"^u {unit['User'][0]} ", made, re.MULTILINE) and unit["StateDirectory"], name
        words = [word for line in unit["ExecStart"] for word in shlex.split(line)]
        own = f"/var/lib/{unit['StateDirectory'][0]}"
        assert all(Path(word).is_relative_to(own) for word in words if word.startswith("/var/lib/")), name
    for group in ("ease", "flower"):
        assert f"m {group} ease-line" in made
    work = [shlex.split(line) for line in units()["ease-work"]["ExecStart"]]
    assert [words[1:3] for words in work] == [["work", "/var/lib/ease/runs/first"], ["request", "due"]]
    assert "OnCalendar=" in (DEPLOY / "ease-work.timer").read_text()


def test_every_service_of_compose_parses_and_shares_only_a_socket(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert services.keys() == {"server", *(f"{kind}-{site}" for kind in ("node", "flower") for site in SITES)}
    server = check_ease(shlex.split(services["server"]["command"]))
    users = re.findall(r"--create-home (?:--groups (\w+) )?(\w+)", of("RUN")[0])
    assert users == [("", "ease"), ("ease", "flower")]
    for site in SITES:
        node, flower = services[f"node-{site}"], services[f"flower-{site}"]
        reported = check_ease(shlex.split(node["command"]))
        assert str(reported["id"]) == site and reported["group"] == "ease"
        mounted = [{each.split(":")[1]: each.split(":")[0] for each in one["volumes"]} for one in (node, flower)]
        for path in (reported["config"], reported["data"], reported["folder"], Path(reported["socket"]).parent):
            assert any(Path(path).is_relative_to(each) for each in mounted[0]), path
        assert node["network_mode"] == "none" and "user" not in node  # that of the image, which is `ease`
        assert set(mounted[0].values()) & set(mounted[1].values()) == {f"line-{site}"}
        words = flower["entrypoint"]
        assert flower["user"] == "flower" and f'socket="{reported["socket"]}"' in words
        assert words[words.index("--superlink") + 1] == f"server:{server['port']}"
        for option in ("--root-certificates", "--auth-supernode-private-key"):
            assert str(Path(words[words.index(option) + 1]).parent) in mounted[1]
    named = {volume.split(":")[0] for each in services.values() for volume in each["volumes"]}
    assert {each for each in named if not each.startswith(".")} == set(compose["volumes"])
    for each in services.values():
        assert (DEPLOY / each["build"]["context"] / each["build"]["dockerfile"]).is_file()


def test_a_command_that_is_wrong_would_be_seen() -> None:
    with pytest.raises(click.UsageError):
        check_ease(["node", "run.toml", "--identity", "0"])


@pytest.mark.engine
def test_flower_knows_the_options_it_is_given(compose: dict[str, Any]) -> None:

    reported = subprocess.run(
        [flower_programs() / "flower-supernode", "--help"], capture_output=True, text=True, check=True
    )
    words = [*compose["x-flower"]["entrypoint"], *shlex.split(units()["flower-supernode"]["ExecStart"][0])]
    options = {word for word in words if word.startswith("--")}
    assert len(options) == 5 and all(option in reported.stdout for option in options)
