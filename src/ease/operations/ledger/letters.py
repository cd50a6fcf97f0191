"""Letters in plain words to the person who asked: received, granted, refused, extended (Art. 12(3) and (4) GDPR)."""

from collections.abc import Sequence
from typing import Literal, get_args

from ease.errors import UserError
from ease.operations.ledger.deadlines import day_in
from ease.operations.ledger.policy import Policy
from ease.operations.ledger.records import NO_AUDIT, Entry, Event, now, stamp

Kind = Literal["received", "extended", "granted", "refused"]
KINDS: tuple[Kind, ...] = get_args(Kind)
CLOSED: dict[str, Kind] = {"done": "granted", "refused": "refused"}
RIGHTS = (
    "If you disagree, you may lodge a complaint with {authority}, and you may go to court.\n"
    "If you have questions, write to {contact}."
)


def kind_of(entry: Entry, kind: str | None = None) -> Kind:
    """Return the letter that the state of a request calls for, or the requested one if it can be written."""
    natural = CLOSED.get(entry.state) or ("extended" if entry.first_deadline else "received")
    if kind is None:
        if entry.state == "cancelled":
            raise UserError(f"{entry.id}: was cancelled, so there is nothing to answer")
        return natural
    if kind not in KINDS:
        raise UserError(f"--kind {kind}: write one of {', '.join(KINDS)}")
    possible = {"received", natural, *(["extended"] if entry.first_deadline else [])}
    if kind not in possible:
        raise UserError(f"{entry.id}: is {entry.state}, so no letter can say that it is {kind}")
    return kind


def letter(
    entry: Entry,
    steps: Sequence[Event],
    policy: Policy,
    notified: Sequence[str] = (),
    kind: str | None = None,
    trained: bool = True,
) -> str:
    """Return the letter as text; what the policy does not name is left to be filled in.

    `trained` says whether the model was trained on what the request names.
    """
    zone, office = policy.time_zone, policy.office
    chosen = kind_of(entry, kind)
    contact = office.contact or "[contact of the data protection officer]"
    rights = RIGHTS.format(authority=office.authority or "[name of the supervisory authority]", contact=contact)
    received = day_in(entry.submitted, zone)
    paragraphs = [
        office.name or "[name of the controller]",
        day_in(stamp(now()), zone),
        f"To: {entry.asked_by or '[name]'}\nOur reference: {entry.id}",
        f"Your request of {received} to have data forgotten",
        *_body(chosen, entry, steps, zone, notified, trained),
        *([rights] if chosen in ("refused", "extended") else [f"If you have questions, write to {contact}."]),
    ]
    return "\n\n".join(paragraphs) + "\n"


def _body(
    kind: Kind, entry: Entry, steps: Sequence[Event], zone: str, notified: Sequence[str], trained: bool
) -> list[str]:
    until = day_in(entry.deadline, zone)
    if kind == "received":
        first = entry.first_deadline or entry.deadline
        return [f"We have received your request. You will hear from us by {day_in(first, zone)}."]
    if kind == "extended":
        why = next((each.why for each in reversed(steps) if each.deadline and each.before is not None), "")
        before = day_in(entry.first_deadline, zone)
        return [
            f"We need more time for your request. Instead of {before}, you will hear from us by {until}.",
            f"The reason: {why or '[reason]'}",
        ]
    if kind == "refused":
        return [
            "We have not done what you asked.",
            f"The reason: {entry.why or '[reason]'}",
        ]
    if entry.outcome.release is None:
        return [
            "We have looked for your data in the model. "
            "Nothing had to be done: what you named had been removed by an earlier request."
        ]
    done = next(
        (each.time for each in reversed(steps) if each.after == "done" and each.before != "done"), entry.deadline
    )
    notice = (
        f"We passed the model on to others before. We asked them to replace it: {', '.join(notified)}."
        if notified
        else ""
    )
    if not trained:
        return [
            f"We have done what you asked. No model was trained on your data. On {day_in(done, zone)} we removed them "
            "from the data with which models are measured and searched."
        ]
    return [
        f"We have done what you asked. On {day_in(done, zone)} the model that had learnt from your data was replaced "
        "by one from which they were removed, and your data are not used for training any more.",
        _measured(entry),
        *([notice] if notice else []),
    ]


def _measured(entry: Entry) -> str:
    """How sure that is, by the verdict of the audit."""
    if entry.outcome.trained_again:
        return "The new model was trained from the start without your data."
    measured = "How well this worked was measured by comparing the model with models that never saw your data. "
    if entry.outcome.passed:
        return measured + "No difference was found. This does not prove that nothing can ever be found."
    if entry.outcome.passed is False:
        return measured + "Differences were found, and a person decided that the model may be used."
    if entry.outcome.verdict.startswith(NO_AUDIT) or not entry.outcome.verdict:
        return "How well this worked was not measured."
    return measured + "The comparison could not determine whether something of your data is left."
