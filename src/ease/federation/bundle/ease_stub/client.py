"""At a client: what Flower brings goes to the node's socket, and the node's answer goes back."""

import socket

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from ease_stub.pipe import receive, send, unwrapped, wrapped

app = ClientApp()


@app.train()
def pass_on(message: Message, context: Context) -> Message:
    """The socket is named by whoever started this node, never by the message."""
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(str(context.node_config["socket"]))
        send(line, unwrapped(message.content))
        return Message(wrapped(receive(line)), reply_to=message)
