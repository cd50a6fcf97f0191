"""At a client: what Flower brings goes to the node's socket, and the node's answer goes back."""

import socket
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from ease_stub.pipe import receive, send, unwrapped, wrapped

app = ClientApp()


@app.train()
def pass_on(message: Message, context: Context) -> Message:
    """The socket is named by the process that started this node, never by the message."""
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(socket_of(context))
        send(line, unwrapped(message.content))
        return Message(wrapped(receive(line)), reply_to=message)


def socket_of(context: Context) -> str:
    """That of the node; nodes of a simulation, which nobody starts, have numbers and sockets in one folder."""
    if "socket" in context.node_config:
        return str(context.node_config["socket"])
    return str(Path(str(context.run_config["nodes"])) / f"{context.node_config['partition-id']}.sock")
