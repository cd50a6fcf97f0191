"""Reminders: what is due, posted as JSON to an address that the policy names."""

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from urllib.parse import urlsplit

from ease.errors import UserError
from ease.operations.ledger.deadlines import Due

SECONDS = 10.0
LOCAL = ("127.0.0.1", "::1", "localhost")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would send ids of requests to an address that nobody chose."""

    def redirect_request(self, *_: object) -> None:
        return None


def check_address(url: str) -> None:
    """Refuse an address that is not https, except on this machine."""
    parts = urlsplit(url)
    if parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in LOCAL):
        return
    raise UserError("policy.toml: remind.url: write an https address, or one of this machine, to post reminders to")


def remind(url: str, folder: str, dues: Sequence[Due]) -> None:
    """Post what is due. Ids, states and days leave the machine; names and reasons do not."""
    check_address(url)
    body = json.dumps({"run": folder, "due": [each.model_dump(mode="json") for each in dues]}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method="POST")
    opener = urllib.request.build_opener(_NoRedirect, urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=SECONDS) as answer:
            answer.read(1 << 16)
    except urllib.error.HTTPError as error:
        error.close()
        raise UserError(f"remind.url: {url} answered {error.code}; nobody was reminded") from error
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", error)
        raise UserError(f"remind.url: {url} cannot be reached ({why}); nobody was reminded") from error
