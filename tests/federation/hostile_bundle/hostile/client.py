"""Reads files, looks into the worker's memory, and gives it jobs that no server of ours made."""

import hashlib
import json
import os
import pickle
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()
LENGTH = struct.Struct(">Q")
HEX = "0123456789abcdef" * 2


@app.train()
def harm(message: Message, context: Context) -> Message:
    wanted = context.run_config
    photo, node, pid = Path(str(wanted["photo"])), Path(str(wanted["node"])), int(wanted["pid"])
    attempts: dict[str, Callable[[], Any]] = {
        "list photographs": lambda: list(photo.parent.iterdir()),
        "read a photograph": photo.read_bytes,
        "list what the node keeps": lambda: list(node.iterdir()),
        "change what the node keeps": lambda: (node / "messages.txt").write_text(""),
        "put a file beside it": lambda: (node.parent / "9.sock").write_text(""),
        "take its socket away": lambda: os.unlink(str(wanted["socket"])),
        "read the node's memory": lambda: os.close(os.open(f"/proc/{pid}/mem", os.O_RDONLY)),
        "read the node's environment": Path(f"/proc/{pid}/environ").read_bytes,
        "look through the node's files": lambda: list(Path(f"/proc/{pid}/fd").iterdir()),
        "stop the node": lambda: os.kill(pid, 0),
    }
    reported = {"uid": os.getuid(), "reached": [], "refused": [], "answers": {}}
    for name, attempt in attempts.items():
        if name in ("change what the node keeps", "put a file beside it", "take its socket away") and not os.getuid():
            continue  # the control that runs as root must do no harm
        try:
            attempt()
        except OSError:
            reported["refused"].append(name)
        else:
            reported["reached"].append(name)
    for name, data in {**made_up(), "a well-formed job": Path(str(wanted["job"])).read_bytes()}.items():
        reported["answers"][name] = spoken(str(wanted["socket"]), data)
    return Message(RecordDict({"it": ConfigRecord({"told": json.dumps(reported)})}), reply_to=message)


def made_up() -> dict[str, bytes]:
    """Messages for the worker: rubbish, code, and jobs in its own encoding that it should not do."""
    job = {"objective": "send_photographs", "round": 1}
    return {
        "rubbish": os.urandom(300),
        "code": pickle.dumps(eval),
        "nothing": b"",
        "a job of few words": sealed(asking(), {"job": sealed(job, {}, seal=False)}),
        "a path for a run": sealed(asking(run="../../../../etc/passwd"), {"job": b"{}"}),
        "another client": sealed(asking(client=7), {"job": b"{}"}),
        "a part that is no part": sealed(asking(), {"job": b"{}", "../../escape": b"x"}),
        "a field of its own": sealed(asking(exec="id"), {"job": b"{}"}),
    }


def asking(**changes: Any) -> dict[str, Any]:
    usual = {
        "kind": "task",
        "client": 1,
        "nonce": os.urandom(16).hex(),
        "run": HEX,
        "vectorized": 1,
        "parts": [],
        "gone": [],
    }
    return {**usual, "deal": None, **changes}


def sealed(header: dict[str, Any], blobs: dict[str, bytes], seal: bool = True) -> bytes:
    """A message in the worker's own encoding."""
    places, data = {}, b""
    for name, blob in blobs.items():
        places[name] = {"dtype": "U8", "shape": [len(blob)], "data_offsets": [len(data), len(data) + len(blob)]}
        data += blob
    table = json.dumps(places).encode()
    table += b" " * (-len(table) % 8)
    payload, text = struct.pack("<Q", len(table)) + table + data, json.dumps(header).encode()
    message = struct.pack(">8sHIQ", b"EASEWIRE", 1, len(text), len(payload)) + text + payload
    return message + hashlib.sha256(message).digest() if seal else message


def spoken(path: str, data: bytes) -> str:
    """What the worker answers, as text."""
    try:
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(20)
            line.connect(path)
            line.sendall(LENGTH.pack(len(data)) + data)
            answer = b""
            while piece := line.recv(1 << 16):
                answer += piece
    except OSError as error:
        return f"cut: {error}"
    return answer[LENGTH.size :].decode("ascii", "replace")
