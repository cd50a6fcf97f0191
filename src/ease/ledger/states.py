"""The states of a request, and the one table that says which may follow which."""

from typing import Literal, get_args

State = Literal["submitted", "approved", "running", "pending", "done", "refused", "cancelled"]
STATES: tuple[State, ...] = get_args(State)
FOLLOWS: dict[State, frozenset[State]] = {
    "submitted": frozenset({"approved", "refused", "cancelled"}),
    "approved": frozenset({"running", "refused", "cancelled"}),
    "running": frozenset({"done", "pending", "refused", "approved"}),  # approved: given back, undone
    "pending": frozenset({"approved", "running", "refused", "cancelled"}),
    "done": frozenset(),
    "refused": frozenset(),
    "cancelled": frozenset(),
}
"""State -> those that may follow it."""
OPEN: frozenset[State] = frozenset(state for state, after in FOLLOWS.items() if after)
"""States in which something is still to be done, and a deadline counts."""
