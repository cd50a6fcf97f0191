"""Bytes in a Flower message, and on a socket after their length."""

import json
import socket
import struct
from collections import OrderedDict
from typing import Any

from flwr.app import Array, ArrayRecord, RecordDict

LENGTH = struct.Struct(">Q")
PIECE = 1 << 20
LARGEST = 1 << 32


def wrapped(data: bytes) -> RecordDict:
    """Bytes as the content of a message; Flower sends arrays in pieces, other values whole."""
    array = Array("uint8", (len(data),), "bytes", data)
    return RecordDict({"message": ArrayRecord(OrderedDict(bytes=array))})


def unwrapped(content: RecordDict) -> bytes:
    return content["message"]["bytes"].data


def send(line: socket.socket, data: bytes) -> None:
    line.sendall(LENGTH.pack(len(data)))
    line.sendall(data)


def receive(line: socket.socket) -> bytes:
    (length,) = LENGTH.unpack(exactly(line, LENGTH.size))
    if length > LARGEST:
        raise ConnectionError(f"a message of {length} bytes")
    return exactly(line, length)


def exactly(line: socket.socket, length: int) -> bytes:
    found = bytearray()
    while len(found) < length:
        piece = line.recv(min(PIECE, length - len(found)))
        if not piece:
            raise ConnectionError("the line was cut")
        found += piece
    return bytes(found)


def packed(header: dict[str, Any], data: bytes = b"") -> bytes:
    """A JSON object and bytes behind it."""
    text = json.dumps(header).encode()
    return LENGTH.pack(len(text)) + text + data


def unpacked(message: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = LENGTH.unpack_from(message)
    end = LENGTH.size + length
    return json.loads(message[LENGTH.size : end]), message[end:]
