"""A process that is killed on the way to a certificate: the same command again gives one that holds."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ease.operations.evidence import issue, read_log, verify
from ease.runs.run import Run
from ease.storage import write_atomic

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are copied by fork"),
]
KILLED = 9


def certify(run: Run, path: Path) -> None:
    write_atomic(path, issue(run, "client-1").file_bytes() + b"\n")


def killed_before(step: int, work: Callable[[], None]) -> bool:
    """Do something in a process that is gone before one of its steps on the disk; False if it came to its end."""
    child = os.fork()
    if child == 0:
        taken = 0
        try:
            for name in ("fsync", "replace"):
                real = getattr(os, name)

                def counted(*arguments: object, real: Callable[..., object] = real) -> object:
                    nonlocal taken
                    if taken == step:
                        os._exit(KILLED)  # no cleaning up, as after kill -9
                    taken += 1
                    return real(*arguments)

                setattr(os, name, counted)
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, KILLED)
    return code == KILLED


@pytest.mark.parametrize("begun", [False, True], ids=["first", "second"])
def test_killed_before_every_step_of_a_certificate(bare: Run, begun: bool) -> None:
    """Of a run's first certificate, which also makes key, salt and log, and of a second one."""
    path, folder, kept = bare.folder / "certificate.json", bare.folder / "evidence", bare.folder / "kept"
    if begun:
        certify(bare, path)
    else:
        folder.mkdir(mode=0o700)
    shutil.copytree(folder, kept)
    step = 0
    while killed_before(step, lambda: certify(bare, path)):
        if begun:  # an older certificate still holds, whatever the newer one came to
            assert verify(path, bare, quick=True).holds, step
        certify(bare, path)
        assert verify(path, bare, quick=True).holds, step
        kinds = [record.kind for record in read_log(bare).records]
        assert kinds[:3] == ["begun", "answered", "audited"] and set(kinds[3:]) == {"certified"}, step
        shutil.rmtree(folder)
        shutil.copytree(kept, folder)
        path.unlink()
        if begun:
            certify(bare, path)
        step += 1
    assert step == 7 if begun else step > 20
