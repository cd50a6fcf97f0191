"""The tutorial of five hospitals works as printed: each command of docs/hospitals.md, in order, with real processes."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ease.federation.remote import node_socket
from ease.runs.run import Run

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```\n(.*?)^```", re.MULTILINE | re.DOTALL)

pytestmark = pytest.mark.slow


def printed() -> list[str]:
    """Every command of the page, without remarks."""
    text = (ROOT / "docs" / "hospitals.md").read_text()
    lines = [line.split("  #")[0].strip() for block in BLOCK.findall(text) for line in block.splitlines()]
    return [line for line in lines if line]


@pytest.fixture
def checkout() -> Iterator[Path]:
    """A folder with the examples, in which `ease` and `python` are ours. Its path is short, for the nodes' sockets."""
    with tempfile.TemporaryDirectory(prefix="ease-", dir="/tmp") as folder:
        yield prepared(Path(folder))


def prepared(folder: Path) -> Path:
    shutil.copytree(ROOT / "examples" / "hospitals", folder / "examples" / "hospitals")
    programs = folder / "bin"
    programs.mkdir()
    for name, words in (("ease", "-m ease"), ("python", "")):
        path = programs / name
        path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {words} "$@"\n')
        path.chmod(0o755)
    return folder


def wait_for(federation: Path, nodes: list[subprocess.Popen[bytes]]) -> None:
    """Wait until every node that was started listens."""
    ends = time.monotonic() + 300
    while not all(node_socket(federation, client).exists() for client in range(len(nodes))):
        assert time.monotonic() < ends and all(node.poll() is None for node in nodes)
        time.sleep(0.2)


def test_every_command_of_the_tutorial_works(checkout: Path) -> None:
    source = str(ROOT / "src")
    environment = {**os.environ, "PATH": f"{checkout / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": source}
    environment |= {"OMP_NUM_THREADS": "1"}
    folder, nodes = checkout, list[subprocess.Popen[bytes]]()
    try:
        for line in printed():
            words = shlex.split(line)
            if words[0] in ("source", "export", "kill"):
                continue
            if words[0] == "cd":
                folder = folder / words[1]
            elif words[-1] == "&":
                nodes.append(subprocess.Popen(words[:-1], cwd=folder, env=environment))
            else:
                wait_for(folder / "federation", nodes)
                done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
                assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    finally:
        for node in nodes:
            node.terminate()
        for node in nodes:
            node.wait(20)
    assert len(nodes) == 5
    run = Run.load(checkout / "hospitals" / "run")
    assert [str(each) for release in run.head.releases for each in release.request.clients] == ["1"]
    assert (run.folder / "purge.json").is_file()
