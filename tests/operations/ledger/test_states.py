"""The state machine of a request under two people and a worker that may die, against a model of what was decided."""

import tempfile
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from ease.errors import UserError
from ease.operations.evidence.keys import SigningKey
from ease.operations.ledger.records import Draft, Entry, Outcome, RequestPlan
from ease.operations.ledger.states import OPEN, State
from ease.operations.ledger.store import Ledger
from ease.requests.request import ClientRequest

PEOPLE = ("ada", "bo")
KEYS = {name: SigningKey(Ed25519PrivateKey.generate()) for name in PEOPLE}
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
        self.approved: dict[str, set[str]] = {}
        self.extended: set[str] = set()

    def teardown(self) -> None:
        self.place.cleanup()

    @rule(target=ids, by=st.sampled_from(PEOPLE), method=st.sampled_from(METHODS))
    def submit(self, by: str, method: dict[str, str]) -> object:
        id = f"r{len(self.state)}"
        self.ledger.add(Draft(ClientRequest(clients=(len(self.state),)), method, by, id=id))
        self.state[id] = "submitted"
        self.approved[id] = set()
        return id

    @rule(id=ids, by=st.sampled_from(PEOPLE))
    def approve(self, id: str, by: str) -> None:
        if by in self.approved[id] and self.state[id] in ("submitted", "held"):
            with pytest.raises(UserError, match="another person has to"):
                self.ledger.approve(id, by)
        elif self.state[id] in ("submitted", "held"):
            self.ledger.approve(id, by)
            self.state[id] = "approved"
            self.approved[id].add(by)
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

    @rule(id=ids, by=st.sampled_from(PEOPLE))
    def refuse(self, id: str, by: str) -> None:
        if self.state[id] in ("submitted", "approved", "pending", "held"):
            self.ledger.refuse(id, by, "no such person")
            self.state[id] = "refused"
        else:
            with pytest.raises(UserError, match="cannot be refused"):
                self.ledger.refuse(id, by, "no such person")

    @rule(id=ids, by=st.sampled_from(PEOPLE))
    def approve_with_another(self, id: str, by: str) -> None:
        """A first approval of two leaves the state; the same person again is refused."""
        if self.state[id] not in ("submitted", "held"):
            return
        if by in self.approved[id]:
            with pytest.raises(UserError, match="another person has to"):
                self.ledger.approve(id, by, KEYS[by], people=2)
            return
        self.ledger.approve(id, by, KEYS[by], people=2)
        self.approved[id].add(by)
        if len(self.approved[id]) == 2:
            self.state[id] = "approved"

    @rule(id=ids, by=st.sampled_from(PEOPLE), days=st.integers(1, 40))
    def extend(self, id: str, by: str, days: int) -> None:
        """Once, while the request is open, by whoever holds it."""
        if self.state[id] in OPEN and id not in self.extended:
            before = self.ledger.entry(id).deadline
            assert self.ledger.extend(id, days, by, "many pairs", key=KEYS[by]).deadline > before
            self.extended.add(id)
        else:
            with pytest.raises(UserError, match="can be extended"):
                self.ledger.extend(id, days, by, "many pairs")

    @rule(id=ids, by=st.sampled_from(PEOPLE))
    def notify(self, id: str, by: str) -> None:
        assert self.ledger.notify(id, "clinic 5", by).notified == ("clinic 5",)

    @rule(id=ids)
    def redact(self, id: str) -> None:
        self.ledger.redact([id])

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
            self.ledger.plan([each.id], RequestPlan(request=each.request, method=each.method))
            self.released.add(each.id)

    @rule(end=st.sampled_from(("done", "refused", "approved", "pending", "held")))
    def end(self, end: State) -> None:
        """A worker gives back what it has released as released, and nothing else."""
        for each in self.claimed:
            state: State = end if each.id not in self.released else "done" if end == "done" else "released"
            self.ledger.finish([each.id], state, "worker", "", Outcome(model_sha256="abc"))
            self.state[each.id] = state
            if state == "held":
                self.approved[each.id] = set()
        self.claimed = []

    @rule()
    def die(self) -> None:
        self.claimed = []

    @rule(id=ids)
    def repeat(self, id: str) -> None:
        entry = self.ledger.entry(id)
        assert not self.ledger.add(Draft(entry.request, entry.method, "ada", id=id))[1]

    @invariant()
    def the_ledger_says_what_was_decided(self) -> None:
        assert {each.id: each.state for each in self.ledger.entries()} == self.state

    @invariant()
    def nothing_released_is_cancelled_and_nothing_cancelled_is_worked_on(self) -> None:
        assert all(self.state[id] not in ("cancelled", "refused") for id in self.released)
        last: dict[str, str] = {}
        for each in self.ledger.events():
            assert each.before == last.get(each.request)
            assert each.before == each.after or each.before not in ("cancelled", "done", "refused")
            assert each.before == each.after or not (each.before in ("running", "released") and each.by in PEOPLE)
            last[each.request] = each.after
        assert last == self.state

    @invariant()
    def the_chain_of_steps_holds(self) -> None:
        assert self.ledger.check()[0] == len(self.ledger.events())


TestRequests = Requests.TestCase
TestRequests.settings = settings(
    max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.slow
def test_many_histories() -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(Requests, settings=settings(max_examples=300, stateful_step_count=60, deadline=None))
