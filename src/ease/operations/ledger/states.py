"""The states of a request, and the one table that says who may take it from which state to which."""

from typing import Literal, get_args

from ease.errors import UserError

State = Literal["submitted", "approved", "running", "pending", "held", "released", "done", "refused", "cancelled"]
Actor = Literal["person", "worker"]
"""A person decides with `ease request`. The worker is the process that holds the worker's lock."""
STATES: tuple[State, ...] = get_args(State)
ACTORS: tuple[Actor, ...] = get_args(Actor)
TRANSITIONS: dict[Actor, dict[State, frozenset[State]]] = {
    "person": {
        "submitted": frozenset({"approved", "refused", "cancelled"}),
        "approved": frozenset({"refused", "cancelled"}),
        "pending": frozenset({"refused", "cancelled"}),
        "held": frozenset({"approved", "refused", "cancelled"}),
    },
    "worker": {
        "approved": frozenset({"running"}),
        "pending": frozenset({"running"}),
        "released": frozenset({"running"}),
        # approved: given back, because the machine failed
        "running": frozenset({"done", "refused", "pending", "held", "released", "approved"}),
    },
}
"""Actor -> state -> the states that may follow. Only the worker moves a running or a released request: its model may be
released already, so a person who cancelled it would wrongly believe that nothing was forgotten."""
OPEN: frozenset[State] = frozenset(state for steps in TRANSITIONS.values() for state in steps)
"""States in which something is still to be done, and in which a deadline counts."""
IN_WORK: frozenset[State] = OPEN - TRANSITIONS["person"].keys()
"""States in which only the worker can move a request."""
HINTS: dict[State, str] = {
    "running": "wait for `ease work` to end; if its process died, run `ease work` again",
    "released": "its model is released already; complete it with `ease work`",
}
"""The action that a person can take instead, in these states."""


def may_move(actor: Actor, state: State, following: State) -> bool:
    """Return whether an actor may take a request from one state to another."""
    return following in TRANSITIONS[actor].get(state, frozenset())


def check_move(id: str, actor: Actor, state: State, following: State) -> None:
    """Refuse a step that the table does not have."""
    if not may_move(actor, state, following):
        allowed = ", ".join(sorted(TRANSITIONS[actor].get(state, ())))
        hint = HINTS.get(state) or (f"possible: {allowed}" if allowed else "nothing can follow")
        raise UserError(f"{id}: is {state} and cannot be {following}; {hint}")
