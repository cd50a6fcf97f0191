"""The states of a request, and the one table that says who may take it from which state to which."""

from typing import Literal, get_args

State = Literal["submitted", "approved", "running", "pending", "done", "refused", "cancelled"]
Actor = Literal["person", "worker"]
"""A person decides with `ease request`; the worker is the one process that holds the right to work."""
STATES: tuple[State, ...] = get_args(State)
ACTORS: tuple[Actor, ...] = get_args(Actor)
FOLLOWS: dict[Actor, dict[State, frozenset[State]]] = {
    "person": {
        "submitted": frozenset({"approved", "cancelled"}),
        "approved": frozenset({"cancelled"}),
        "pending": frozenset({"approved", "cancelled"}),
    },
    "worker": {
        "approved": frozenset({"running"}),
        "pending": frozenset({"running"}),
        # approved: given back, undone
        "running": frozenset({"done", "pending", "refused", "approved"}),
    },
}
"""Actor -> state -> states that it may be taken to. Nobody but the worker moves a running request: its answer may
have been released already, so a person who cancels it then would be told that nothing was forgotten."""
OPEN: frozenset[State] = frozenset(state for steps in FOLLOWS.values() for state in steps)
"""States in which something is still to be done, and a deadline counts."""


def following(actor: Actor, state: State) -> frozenset[State]:
    """States to which an actor may take a request from this one."""
    return FOLLOWS[actor].get(state, frozenset())
