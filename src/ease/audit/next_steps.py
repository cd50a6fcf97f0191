"""Commands to try after an audit that did not pass, with expected costs."""

from ease.audit.config import AuditConfig
from ease.audit.joint import LEAST_RETRAINED
from ease.audit.preflight import USUAL_POOL
from ease.audit.records import AuditRecord, Price
from ease.audit.verdict import Reason
from ease.methods import METHODS
from ease.methods.ease.method import CLIENT_RECOVERY, REPLAY_RECOVERY
from ease.requests.request import ClientRequest
from ease.runs.resolve import request_flags, request_id

USUAL_RETRAINS = 9
ASKED = ("shadows", "pool", "fpr", "attack")
"""Settings of an audit that are options of its command; how many retrainings is another matter."""
MOST_RECOVERY = 0.8
"""More rounds than this, and retraining is hardly dearer."""


def next_steps(record: AuditRecord, run: str = "RUN", name: str = "") -> tuple[str, ...]:
    """The next commands after a verdict, the most promising first; none after one that passed.

    Costs are guessed from what the record measured: replays and recovery by the seconds of their phase and the rounds
    that it had, retrainings by the seconds of the one that answered the request.
    """
    name = name or f"{request_id(record.request)}/{record.method_name}"
    match record.verdict.reason:
        case Reason.LIKE_RETRAINING | Reason.IDENTICAL:
            return ()
        case Reason.DIFFERENT:
            return (_retrained(record, run),)
        case Reason.TOO_FEW:
            return (_more_retrainings(record, run, name, max(USUAL_RETRAINS, LEAST_RETRAINED - 1)),)
        case Reason.NO_SIGNAL:
            pairs = len(record.similarities.get("unlearned", ()))
            return (
                f"audit a request with more forget pairs, here {pairs}: nothing else makes an audit see as much more",
                _more_retrainings(record, run, name, 2 * (record.verdict.retrained - 1) + 1),
            )
    return (*_other_settings(record, run), _retrained(record, run))


def _other_settings(record: AuditRecord, run: str) -> list[str]:
    """EASE with more of what it has not spent yet; instead of another method, EASE."""
    forget = f"ease forget {run} {request_flags(record.request)}"
    if record.method_name != "ease":
        return [f"{forget}: forget by EASE instead of {record.method_name}"]
    costs, phases = record.costs, record.costs.phases
    whole, replay, recovery = (
        _seconds(record).answer,
        phases.get("subtraction", 0.0),
        phases.get("recovery", 0.0),
    )
    found = []
    if not isinstance(record.request, ClientRequest) and 0 < costs.replayed_rounds < costs.training_rounds:
        seconds = whole + replay * (costs.training_rounds / costs.replayed_rounds - 1)
        found.append(
            f"{forget} {_set(record, replay=1.0)}: the exact replay of all {costs.training_rounds} rounds instead of "
            f"{costs.replayed_rounds}, {_about(seconds)}"
        )
    share = record.method.get("recovery_share", "auto")
    if share == "auto":
        share = CLIENT_RECOVERY if isinstance(record.request, ClientRequest) else REPLAY_RECOVERY
    if 2 * share <= MOST_RECOVERY:
        doubled = _set(record, recovery_share=2 * share)
        found.append(f"{forget} {doubled}: twice the rounds of recovery, {_about(whole + recovery)}")
    return found


def _set(record: AuditRecord, **changes: float) -> str:
    """The changed settings together with these, as options."""
    usual = METHODS[record.method_name]().model_dump(mode="json")
    kept = {key: value for key, value in record.method.items() if usual.get(key) != value}
    return " ".join(f"--set {key}={_value(value)}" for key, value in (kept | changes).items())


def _value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _retrained(record: AuditRecord, run: str) -> str:
    seconds = _seconds(record).retrain
    return (
        f"ease release {run} --request {request_id(record.request)}/retrain: continue from the answer of --method "
        f"retrain, which is there already and costs nothing more (it took {seconds:.0f} s)"
    )


def _more_retrainings(record: AuditRecord, run: str, name: str, retrains: int) -> str:
    there = record.verdict.retrained - 1
    seconds = (retrains - there) * _seconds(record).retrain
    return (
        f"ease audit {run} --request {name} --retrains {retrains}{_chosen(record)}: {retrains - there} more "
        f"retrainings, {_about(seconds)} one after the other; all that is there is used again"
    )


def _chosen(record: AuditRecord) -> str:
    """What else was chosen for the audit: with other values not all that is there could be used again."""
    usual, had = AuditConfig(pool=USUAL_POOL).model_dump(), record.settings.model_dump()
    return "".join(f" --{key} {_value(had[key])}" for key in ASKED if had[key] not in (None, usual[key]))


def _seconds(record: AuditRecord) -> Price:
    return record.costs.totals.get("seconds", Price.of(0.0, 0.0))


def _about(seconds: float) -> str:
    return f"about {seconds:.0f} s" if seconds < 120 else f"about {seconds / 60:.0f} min"
