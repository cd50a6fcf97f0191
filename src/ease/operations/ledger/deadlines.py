"""Deadlines: the end of a day in a named time zone, how far one may be moved, and what is due soon."""

import calendar
from collections.abc import Iterable
from datetime import datetime, time, timedelta
from typing import Literal
from zoneinfo import ZoneInfo

from ease.config import Config
from ease.errors import UserError
from ease.operations.ledger.records import Entry, stamp
from ease.operations.ledger.states import State

EXTENSION_MONTHS = 2
"""The most that a deadline may be moved, once: Art. 12(3) GDPR."""
SOON_DAYS = 7
Urgency = Literal["overdue", "soon", "later"]


class Due(Config):
    """An open request and the time that is left for it."""

    id: str
    state: State
    deadline: str
    day: str
    """The last day, in the time zone of the policy."""
    days_left: int
    """Days until then; negative if it has passed."""
    urgency: Urgency
    waits_for: str
    """The action that has to happen next."""


def months_after(time: datetime, months: int) -> datetime:
    """Return the same day some months later, or the last day of that month."""
    place = time.month - 1 + months
    year, month = time.year + place // 12, place % 12 + 1
    return time.replace(year=year, month=month, day=min(time.day, calendar.monthrange(year, month)[1]))


def end_of_day(moment: datetime, zone: str) -> datetime:
    """Return the last millisecond of the day that a moment is in."""
    local = moment.astimezone(ZoneInfo(zone))
    return datetime.combine(local.date(), time(23, 59, 59, 999000), local.tzinfo)


def month_later(moment: datetime, zone: str) -> datetime:
    """Return the usual deadline: the end of the same day of the next month."""
    return end_of_day(months_after(moment.astimezone(ZoneInfo(zone)), 1), zone)


def parse_deadline(text: str, zone: str) -> datetime:
    """Return what a person wrote: a day lasts until its end, a time without a zone is in that of the policy."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise UserError(f"--due {text}: write a date such as 2030-01-31") from error
    found = found if found.tzinfo else found.replace(tzinfo=ZoneInfo(zone))
    return end_of_day(found, zone) if len(text) <= len("2030-01-31") else found


def day_in(moment: str, zone: str) -> str:
    """Return the day of a stamp, as people in a time zone call it."""
    return datetime.fromisoformat(moment).astimezone(ZoneInfo(zone)).date().isoformat()


def extended(entry: Entry, days: int, moment: datetime, zone: str) -> datetime:
    """Return the deadline of a request that is moved by some days, or refuse to move it."""
    if days < 1:
        raise UserError(f"--days {days}: write a number of days of at least 1")
    if entry.first_deadline:
        raise UserError(f"{entry.id}: was extended before, and a deadline can be extended once")
    if entry.is_overdue(moment):
        raise UserError(f"{entry.id}: its deadline has passed, and an extension has to be reported before it")
    before = datetime.fromisoformat(entry.deadline).astimezone(ZoneInfo(zone))
    after, latest = end_of_day(before + timedelta(days=days), zone), months_after(before, EXTENSION_MONTHS)
    if after > end_of_day(latest, zone):
        most = (latest.date() - before.date()).days
        raise UserError(f"--days {days}: at most {EXTENSION_MONTHS} further months are allowed, here {most} days")
    return after


def due(entries: Iterable[Entry], moment: datetime, zone: str, within: int = SOON_DAYS) -> list[Due]:
    """Return every open request with its urgency, the most urgent first."""
    found = [_due(entry, moment, zone, within) for entry in entries if entry.is_open]
    return sorted(found, key=lambda each: (each.deadline, each.id))


def _due(entry: Entry, moment: datetime, zone: str, within: int) -> Due:
    day = day_in(entry.deadline, zone)
    left = (datetime.fromisoformat(day).date() - moment.astimezone(ZoneInfo(zone)).date()).days
    urgency: Urgency = "overdue" if entry.deadline < stamp(moment) else "soon" if left <= within else "later"
    return Due(
        id=entry.id,
        state=entry.state,
        deadline=entry.deadline,
        day=day,
        days_left=left,
        urgency=urgency,
        waits_for="a decision" if entry.state in ("submitted", "held") else "ease work",
    )


def in_words(each: Due) -> str:
    """Return how much time is left, as people say it."""
    if each.urgency == "overdue":
        return f"overdue since {each.day}"
    return {0: "due today", 1: "due tomorrow"}.get(each.days_left, f"due in {each.days_left} days")
