"""The state machine of a request under two people and a worker that may die, against a model of what was decided."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from ease.errors import UserError
from ease.operations.ledger.records import Draft, Entry, Outcome, Plan
from ease.operations.ledger.states import State
from ease.operations.ledger.store import Ledger
from ease.requests.request import ClientRequest

PEOPLE = ("ada", "bo")
METHODS = ({"method": "ease"}, {"method": "retrain"})


class Requests(RuleBasedStateMachine):
    """What people decided and what was released is kept beside the ledger, and each step is tried on both."""

    ids = Bundle("ids")

    def __init__(self) -> None:
        super().__init__()
        self.place = tempfile.TemporaryDirectory()
        self.ledger = Ledger(Path(self.place.name))
        self.state: dict[str, str] = {}
        self.released: set[str] = set()
        self.claimed: list[Entry] = []

    def teardown(self) -> None:
        self.place.cleanup()

    @rule(target=ids, by=st.sampled_from(PEOPLE), method=st.sampled_from(METHODS))
    def submit(self, by: str, method: dict[str, str]) -> object:
        id = f"r{len(self.state)}"
        self.ledger.add(Draft(ClientRequest(clients=(len(self.state),)), method, by, id=id))
        self.state[id] = "submitted"
        return id

    @rule(id=ids, by=st.sampled_from(PEOPLE))
    def approve(self, id: str, by: str) -> None:
        if self.state[id] in ("submitted", "held"):
            self.ledger.approve(id, by)
            self.state[id] = "approved"
        else:
            with pytest.raises(UserError, match="cannot be approved"):
                self.ledger.approve(id, by)

    @rule(id=ids, by=st.sampled_from(PEOPLE))
    def cancel(self, id: str, by: str) -> None:
        if self.state[id] in ("submitted", "approved", "pending", "held"):
            self.ledger.cancel(id, by, "")
            self.state[id] = "cancelled"
        else:
            with pytest.raises(UserError, match="cannot be cancelled"):
                self.ledger.cancel(id, by, "")

    @rule(together=st.booleans())
    def claim(self, together: bool) -> None:
        """Also what a worker does that comes after one that died."""
        self.claimed = self.ledger.claim("worker", together)
        running = {id for id, state in self.state.items() if state == "running"}
        chosen = {each.id for each in self.claimed}
        if running:
            assert chosen <= running and chosen
        for each in self.claimed:
            assert self.state[each.id] in ("approved", "pending", "released", "running") and each.state == "running"
            self.state[each.id] = "running"

    @rule()
    def release(self) -> None:
        """What is planned is stored before it is done."""
        for each in self.claimed:
            self.ledger.plan([each.id], Plan(request=each.request, method=each.method))
            self.released.add(each.id)

    @rule(end=st.sampled_from(("done", "refused", "approved", "pending", "held")))
    def end(self, end: State) -> None:
        """A worker gives back what it has released as released, and nothing else."""
        for each in self.claimed:
            state: State = end if each.id not in self.released else "done" if end == "done" else "released"
            self.ledger.finish([each.id], state, "worker", "", Outcome(model_sha256="abc"))
            self.state[each.id] = state
        self.claimed = []

    @rule()
    def die(self) -> None:
        self.claimed = []

    @rule(id=ids)
    def repeat(self, id: str) -> None:
        entry = self.ledger.entry(id)
        assert not self.ledger.add(Draft(entry.request, entry.method, entry.asked_by, id=id))[1]

    @invariant()
    def the_ledger_says_what_was_decided(self) -> None:
        assert {each.id: each.state for each in self.ledger.entries()} == self.state

    @invariant()
    def nothing_released_is_cancelled_and_nothing_cancelled_is_worked_on(self) -> None:
        assert all(self.state[id] not in ("cancelled", "refused") for id in self.released)
        last: dict[str, str] = {}
        for each in self.ledger.events():
            assert each.before == last.get(each.request) and each.before not in ("cancelled", "done", "refused")
            assert not (each.before in ("running", "released") and each.by in PEOPLE)
            last[each.request] = each.after
        assert last == self.state


TestRequests = Requests.TestCase
TestRequests.settings = settings(
    max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.slow
def test_many_histories() -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(Requests, settings=settings(max_examples=300, stateful_step_count=60, deadline=None))
