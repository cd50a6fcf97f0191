"""Who decides: names, the keys they sign with, and what the policy asks of a decision."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from ease.errors import UserError
from ease.operations.evidence.canonical import Refuted
from ease.operations.evidence.keys import SigningKey, read_signing_key
from ease.operations.ledger.policy import NAME, ApprovalPolicy
from ease.operations.ledger.records import Event, now, stamp
from ease.operations.ledger.steps import FIRST_OF_SEVERAL, signer


@dataclass(frozen=True)
class Person:
    """Who takes a step."""

    name: str
    key: SigningKey | None = None


def person(policy: ApprovalPolicy, name: str, key: Path | None) -> Person:
    """Return who decides. A key in the policy names its owner; without one, `name` is taken on trust."""
    if key is None:
        if policy.signed:
            raise UserError(f"{NAME}: approval.signed: decisions are signed here; name your key with --key")
        return Person(name)
    signing = read_signing_key(key)
    owner = _owner(policy, signing.public.id)
    if owner is None and (policy.signed or policy.keys):
        raise UserError(f"{key}: belongs to nobody in {NAME}; add its id to approval.keys: {signing.public.id}")
    if _is_revoked(policy, signing.public.id, stamp(now())):
        raise UserError(f"{key}: was revoked on {policy.revoked[signing.public.id]} ({NAME}: approval.revoked)")
    return Person(owner or name, signing)


def check_signers(steps: Sequence[Event], policy: ApprovalPolicy, where: str) -> str:
    """Refuse decisions that are not signed as the policy asks; return what was found in one line."""
    signed, unknown = 0, set[str]()
    for number, step in enumerate(steps, start=1):
        key, place = signer(step), f"{where}: step {number} ({step.request})"
        if key is None:
            if policy.signed and step.after in ("approved", "refused") and step.before not in ("running", step.after):
                raise Refuted(f"{place}: {step.after} by {step.by} without a signature, and the policy wants one")
            continue
        signed += 1
        if _is_revoked(policy, key.id, step.time):
            raise Refuted(f"{place}: signed with a key that was revoked before ({key.id})")
        owner = _owner(policy, key.id)
        if owner is None:
            unknown.add(key.id)
        elif step.before is not None and step.by != owner:
            raise Refuted(f"{place}: says that {step.by} took it, and the key is that of {owner}")
    words = f"{len(steps)} steps, each with the hash of the one before, {signed} of them signed"
    return words + (f", by {len(unknown)} keys that {NAME} does not name" if unknown else "")


def missing_approval(id: str, steps: Sequence[Event], policy: ApprovalPolicy) -> str:
    """Return why a request's steps do not satisfy the policy's approval rule; empty if they do."""
    people = set[str]()
    for step in steps:
        if step.request != id:
            continue
        key = signer(step)
        trusted = not policy.signed if key is None else _owner(policy, key.id) is not None or not policy.signed
        if step.after in ("submitted", "held") and step.before != step.after:
            people = set()  # people decide anew on a held model
        elif step.before in ("submitted", "held") and _approves(step) and trusted:
            people.add(step.by if key is None else key.id)
    if len(people) >= policy.people:
        return ""
    signed = "signed approvals" if policy.signed else "approvals"
    return f"{NAME}: approval asks for {policy.people} {signed}, and the request has {len(people)}; approve it again"


def _approves(step: Event) -> bool:
    several = step.before == step.after and not step.deadline and step.why.startswith(FIRST_OF_SEVERAL)
    return step.after == "approved" or several


def _owner(policy: ApprovalPolicy, key_id: str) -> str | None:
    return next((name for name, id in policy.keys.items() if id == key_id), None)


def _is_revoked(policy: ApprovalPolicy, key_id: str, time: str) -> bool:
    since = policy.revoked.get(key_id)
    return since is not None and time[:10] >= date.fromisoformat(since).isoformat()
