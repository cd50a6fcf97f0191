"""A measure is added to the audit as docs/howto.md says."""

import re
from pathlib import Path

import numpy as np
import pytest

from ease.audit import measurements, verdict
from ease.audit.measurements import Instruments

HOWTO = (Path(__file__).parents[2] / "docs" / "howto.md").read_text()
SECTION = HOWTO.partition("## Add a measure to the audit")[2].partition("\n## ")[0]


def test_the_documented_measure_has_a_title_a_band_and_a_value() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
    known = dict(vars(measurements))
    exec(code, known)
    rng = np.random.default_rng(0)
    models = ("unlearned", "trained", "retrain", *(f"retrain-{n}" for n in range(1, 6)), "kept-0.5-of-retrain")
    odds = {name: rng.normal(size=20) for name in models}
    odds["unlearned"] += 5.0
    found = known["forget_level"](odds)
    assert found.value == pytest.approx(odds["unlearned"].sum() / 20) and found.inside is False
    assert found.before == pytest.approx(odds["trained"].mean()) and len(found.retrained) == 6
    (name, title), *_ = re.findall(r'`"([^"]+)": "([^"]+)",` in `TITLES`', SECTION)
    assert name == found.name and isinstance(verdict.TITLES, dict) and title


@pytest.mark.slow
def test_the_documented_measure_takes_part_in_an_audit(audited, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line is added to the source of the method that lists all measures."""
    import inspect
    import textwrap

    (code,) = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
    (line,) = re.findall(r"the line `(forget_level\(.*?\),)` in `measures`", SECTION)
    source = textwrap.dedent(inspect.getsource(Instruments._measured))
    known = vars(measurements)
    monkeypatch.setitem(known, "forget_level", None)
    exec(code, known)
    exec(
        source.replace("        alignment(similar),", f"        alignment(similar),\n        {line}"),
        changed := dict(known),
    )
    monkeypatch.setattr(Instruments, "_measured", changed["_measured"])
    audit = audited.audits["finetune"]
    found = audit.instruments.measure(audit.stored.model())
    (added,) = [each for each in found.measures if each.name == "forget/log_odds"]
    assert found.verdict.joint is not None and found.verdict.joint.measures == len(found.measures)
    assert added.retrain < min(added.before, added.value), "finetune leaves what retraining never saw"
