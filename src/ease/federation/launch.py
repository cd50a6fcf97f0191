"""Flower's own programs, started so that nothing phones home: its server, its nodes, and the stub between."""

import ctypes
import ipaddress
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import tomli_w

from ease.errors import Disconnected, UserError
from ease.federation.credentials import Authority, read_admitted
from ease.federation.flower import GRID, SERVER, Flower
from ease.federation.remote import node_socket
from ease.storage import write_atomic, write_json

BUNDLE = Path(__file__).absolute().parent / "bundle"
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "UV_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
}
"""No telemetry, no look for updates, no installation at run time; and a shorter wait before an app is started."""
CONNECTION = "ease"
STARTING = 180.0
"""Seconds in which a program of Flower must be up, on a busy machine."""
ENDING = 10.0
AT_ONCE = 4
"""Programs of Flower that are started at the same time."""


def flower_programs() -> Path:
    """The folder of Flower's programs: EASE_FLOWER, this environment, or wherever the shell finds them."""
    named = os.environ.get("EASE_FLOWER")
    on_path = shutil.which("flower-superlink")
    for folder in (named, Path(sys.executable).parent, on_path and Path(on_path).parent):
        if folder and (Path(folder) / "flower-superlink").is_file():
            return Path(folder).absolute()
    raise UserError(
        "flower-superlink: not found; install Flower (python3 -m venv flower && flower/bin/pip install flwr==1.41.0) "
        "and say where it is: export EASE_FLOWER=$PWD/flower/bin"
    )


def environment(folder: Path) -> dict[str, str]:
    """What Flower's programs are started with."""
    programs = flower_programs()
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("FLWR_", "PYTHONPATH"))}
    return {
        **inherited,
        **QUIET,
        "FLWR_HOME": str((folder / "flower").absolute()),
        "PATH": f"{programs}:{os.environ.get('PATH', '')}",
    }


def start(folder: Path, log: str, *command: str) -> "subprocess.Popen[bytes]":
    """A program of Flower in a process group of its own, that writes to a file."""
    (folder / "flower").mkdir(parents=True, exist_ok=True)
    with (folder / "flower" / log).open("ab") as file:
        program = str(flower_programs() / command[0])
        return subprocess.Popen(
            [program, *command[1:]],
            env=environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,  # Ctrl-C is ours to answer
            preexec_fn=die_with_parent,
        )


_LIBC = ctypes.CDLL(None, use_errno=True)
DEATH_SIGNAL = 1
"""The option of `prctl` that sends a signal when the parent dies."""


def die_with_parent() -> None:
    """To be called in a new process: a parent that is killed leaves no one behind who holds its port."""
    if hasattr(_LIBC, "prctl"):
        _LIBC.prctl(DEATH_SIGNAL, signal.SIGTERM)


def stop(process: "subprocess.Popen[bytes]") -> None:
    """End a program and what it started: Flower starts others, some of which outlive it for a while."""
    started = descendants(process.pid)
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(ENDING)
    process.kill()
    process.wait()
    for pid, name in started.items():
        with suppress(ProcessLookupError, PermissionError):
            if _birth(pid) == name:  # else the number is another process's by now
                os.kill(pid, signal.SIGKILL)


def descendants(pid: int) -> dict[int, str]:
    """Processes that a process started, and those that they started, each with when it was born."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, IndexError, ValueError):
                parents[int(entry.name)] = int(_facts(int(entry.name))[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return {child: birth for child in found - {pid} if (birth := _birth(child))}


def _facts(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _birth(pid: int) -> str:
    with suppress(OSError, IndexError):
        return _facts(pid)[19]
    return ""


@dataclass
class FlowerServer:
    """Flower's server of a federation, with the stub that passes our messages on."""

    folder: Path
    host: str = "127.0.0.1"
    port: int = 8000
    insecure: bool = False
    simulated: int = 0
    """So many nodes of Flower are simulated in one process, which needs Ray; 0: they are processes of their own."""
    process: "subprocess.Popen[bytes] | None" = None
    _registered: set[str] = field(default_factory=set)

    def __enter__(self) -> "FlowerServer":
        check_exposure(self.host, self.insecure)
        if self.simulated and not self.insecure:
            raise UserError("--simulation: simulated nodes have no keys; add --insecure")
        authority = Authority(self.folder / "keys")
        if not self.insecure and not authority.certificate.is_file():
            raise UserError(
                f"{authority.certificate}: missing; make it with `ease keys server {self.folder} --host NAME`, or use "
                "--insecure, on this machine alone"
            )
        if _answers(self.host, self.port):
            raise UserError(f"--port {self.port}: another program listens there; choose another one")
        write_json(self.folder / SERVER, {"host": self.host, "port": self.port, "insecure": self.insecure})
        self._write_connection(authority)
        secure = (
            *("--ssl-ca-certfile", str(authority.certificate)),
            *("--ssl-certfile", str(authority.server_certificate)),
            *("--ssl-keyfile", str(authority.server_key)),
            "--enable-supernode-auth",
        )
        self.process = start(
            self.folder,
            "server.log",
            "flower-superlink",
            *("--host", self.host, "--port", str(self.port)),
            *("--database", str((self.folder / "flower" / "link.db").absolute())),
            "--disable-runtime-dependency-installation",
            *(("--insecure",) if self.insecure else secure),
            *(("--simulation",) if self.simulated else ()),
        )
        try:
            self._await(lambda: _answers(self.host, self.port), "Flower's server did not come up")
            self.register()
            self.connect()
        except BaseException:
            stop(self.process)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            stop(self.process)
        (self.folder / GRID).unlink(missing_ok=True)

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def register(self) -> None:
        """Make the keys of admitted clients known to Flower, and no others."""
        if self.insecure:
            return
        new = {c: text for c, text in read_admitted(self.folder).clients.items() if text not in self._registered}
        folder = (self.folder / "flower").absolute()  # Flower's program starts in another working directory
        paths = {client: folder / f"client-{client}.pub" for client in new}
        for client, text in new.items():
            write_atomic(paths[client], f"{text}\n".encode())
        with ThreadPoolExecutor(AT_ONCE) as pool:
            answers = pool.map(lambda path: self._flwr("supernode", "register", str(path), CONNECTION), paths.values())
        for (client, text), finished in zip(new.items(), answers, strict=True):
            if finished.returncode and "already" not in finished.stdout.lower() + finished.stderr.lower():
                raise UserError(f"client {client}: Flower does not take its key: {_last(finished)}")
            self._registered.add(text)

    def connect(self) -> None:
        """Start the stub, and wait until it answers."""
        (self.folder / GRID).unlink(missing_ok=True)
        path = (self.folder / GRID).absolute()
        if len(os.fsencode(path)) > 100:
            raise UserError(f"{path}: too long for a socket; choose a folder with a shorter path")
        nodes = node_socket(self.folder.absolute(), 0).parent
        finished = self._flwr(
            *("run", str(BUNDLE), CONNECTION, "--run-config", f'socket="{path}" nodes="{nodes}"'),
            *(("--federation-config", _simulation(self.simulated)) if self.simulated else ()),
        )
        if finished.returncode:
            raise UserError(f"{self.folder}: Flower does not start the stub: {_last(finished)}")
        self._await(self.connected, "the stub at the server did not come up")

    def connected(self) -> bool:
        try:
            Flower(self.folder).nodes()
        except (Disconnected, TimeoutError):
            return False
        return True

    def _flwr(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [str(flower_programs() / "flwr"), *arguments],
            env=environment(self.folder),
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=STARTING,
        )

    def _write_connection(self, authority: Authority) -> None:
        address = f"{'127.0.0.1' if self.host in ('0.0.0.0', '::') else self.host}:{self.port}"
        secure: dict[str, object] = {"root-certificates": str(authority.certificate.absolute())}
        table = {"address": address, **({"insecure": True} if self.insecure else secure)}
        content = tomli_w.dumps({"superlink": {"default": CONNECTION, CONNECTION: table}})
        write_atomic(self.folder / "flower" / "config.toml", content.encode())

    def _await(self, ready: Callable[[], bool], problem: str) -> None:
        until = time.monotonic() + STARTING
        while not ready():
            if not self.alive or time.monotonic() > until:
                raise UserError(f"{problem}; see {self.folder / 'flower' / 'server.log'}")
            time.sleep(0.2)


def _simulation(nodes: int) -> str:
    """Each simulated node may wait for its socket while the others do: they need no processor for it."""
    return f"num-supernodes={nodes} client-resources-num-cpus=1 init-args-num-cpus={nodes}"


def start_supernode(
    folder: Path, client: int, node: Path, server: str, key: Path | None, certificate: Path | None, port: int = 0
) -> "subprocess.Popen[bytes]":
    """Flower's end at a client, which passes messages on to the socket `node`."""
    host = server.rpartition(":")[0]
    if key is None or certificate is None:
        check_exposure(host, insecure=True)
        secure: tuple[str, ...] = ("--insecure",)
    else:
        secure = ("--root-certificates", str(certificate), "--auth-supernode-private-key", str(key))
    return start(
        folder,
        f"node-{client}.log",
        "flower-supernode",
        *secure,
        *("--superlink", server, "--port", str(port or free_port())),
        *("--node-config", f'socket="{node.absolute()}"'),
    )


def check_exposure(host: str, insecure: bool) -> None:
    """Refuse to speak in the clear to anyone beyond this machine."""
    if not insecure:
        return
    try:
        local = host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        local = False
    if not local:
        raise UserError(f"--insecure: {host} is not this machine; make keys with `ease keys`, or use 127.0.0.1")


def free_port() -> int:
    with socket.socket() as line:
        line.bind(("127.0.0.1", 0))
        return int(line.getsockname()[1])


def _answers(host: str, port: int) -> bool:
    with (
        suppress(OSError),
        socket.create_connection(("127.0.0.1" if host in ("0.0.0.0", "::") else host, port), timeout=1.0),
    ):
        return True
    return False


def _last(finished: "subprocess.CompletedProcess[str]") -> str:
    text = re.sub(r"[^ -~]+", " ", f"{finished.stdout} {finished.stderr}")
    return " ".join(text.split())[-300:]
