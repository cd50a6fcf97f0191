"""Hooks of mkdocs: the root's own pages join the site, links lead there, and search works from a disk."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
FILES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "CITATION.cff")
LINK = re.compile(r"(\]\()([^)\s]+)((?: \"\w+\")?\))")
FETCHED = re.compile(r"<script src=\"?https://unpkg\.com/iframe-worker/shim\"?></script>")
"""What the theme would fetch to search without a server, and with a network."""
DIALOG = re.compile(r"(<div class=\"md-search\"[^>]* role=\"dialog\")")
"""The theme's search, which it gives no name."""
WORKER = """<script>
// Browsers start no workers from a disk: a hidden frame takes their part.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.title = "search";
      document.body.append(frame);
      const inside = frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", {data}));
      this.loaded = new Promise((resolve) => {
        const script = inside.document.createElement("script");
        script.src = url;
        script.onload = resolve;
        inside.document.body.append(script);
      });
      this.inside = inside;
    }
    postMessage(data) {
      this.loaded.then(() => this.inside.dispatchEvent(new this.inside.MessageEvent("message", {data})));
    }
    terminate() {}
  };
}
</script>"""


def on_files(files: Files, config: Any) -> Files:
    """Add the root's own pages and the citation they link to, under project/."""
    for name in FILES:
        files.append(File.generated(config, f"project/{name}", content=(ROOT / name).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links out of docs/ lead to project/, and those of the root's pages into docs/."""
    folder = page.file.src_uri.rpartition("/")[0]
    return LINK.sub(lambda found: f"{found[1]}{moved(found[2], folder)}{found[3]}", markdown)


def moved(link: str, folder: str) -> str:
    """Where a link of a page in a folder of the site leads there."""
    if folder == "project" and link.startswith("docs/"):
        return f"../{link.removeprefix('docs/')}"
    if folder == "" and link.startswith("../"):
        return f"project/{link.removeprefix('../')}"
    return link


def on_post_page(output: str, **_: Any) -> str:
    named = DIALOG.sub(r'\1 aria-label="Search"', output)
    return FETCHED.sub(lambda _: WORKER, named)
