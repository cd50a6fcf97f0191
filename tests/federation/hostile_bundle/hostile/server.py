"""Sends the harm to every node, and writes down what each came to."""

import json
import time
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    messages = [
        Message(RecordDict({"none": ConfigRecord({"x": 0})}), dst_node_id=node, message_type="train")
        for node in grid.get_node_ids()
    ]
    waiting, found = set(grid.push_messages(messages)), []
    until = time.monotonic() + 100
    while waiting and time.monotonic() < until:
        for reply in grid.pull_messages(waiting):
            waiting.discard(reply.metadata.reply_to_message_id)
            found.append(
                {"error": reply.error.reason} if reply.has_error() else json.loads(reply.content["it"]["told"])
            )
        time.sleep(0.5)
    path = Path(str(context.run_config["result"]))
    path.with_suffix(".part").write_text(json.dumps(found))
    path.with_suffix(".part").rename(path)
