"""`ease audit`."""

from typing import Annotated

import typer

from ease.cli.options import Quiet, Result, Run, tracked
from ease.errors import UserError


@tracked
def audit(
    run: Run,
    request: Annotated[
        list[str],
        typer.Option(help="The result to audit, e.g. client-3 or client-3/finetune. Several share their shadows."),
    ],
    shadows: Annotated[
        int, typer.Option(min=4, help="Shadow models, an even number. More give stronger attacks.")
    ] = 16,
    retrains: Annotated[int, typer.Option(min=1, help="Further retraining runs to compare with.")] = 9,
    fpr: Annotated[float, typer.Option(help="False positive rate at which members are counted.")] = 0.01,
    attack: Annotated[
        str, typer.Option(help="Attack on forget pairs: bavaria, or the strongest before unlearning.")
    ] = "bavaria",
    pool: Annotated[
        int | None,
        typer.Option(min=16, help="Unseen pairs that calibrate every statistic. By default 512, or as the data allow."),
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes that train shadows.")] = None,
    retrain: Annotated[bool, typer.Option("--retrain", help="Run the retraining first if it is missing.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Only measure how strongly forget pairs are memorised. No verdict.")
    ] = False,
    deployed: Annotated[
        bool, typer.Option("--deployed", help="Only compare the ONNX and int8 forms with the float model. No verdict.")
    ] = False,
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="Exit with 0: passed, 1: not passed, 3: undecided (2: an error).")
    ] = False,
    quiet: Quiet = False,
) -> Result:
    """Test whether a result is indistinguishable from retraining.

    The audit compares recall, alignment, membership attacks, relearning and cost with retrained models.

    Examples: `ease audit runs/first --request client-3 --retrain`, `ease audit runs/first --request client-3 --quick`
    """
    if deployed:
        if quick or exit_code or retrain or len(request) > 1:
            raise UserError("--deployed takes one --request and none of --quick, --retrain and --exit-code")
        from ease.commands.audit import deployed_run

        return deployed_run(run, request[0], quiet)
    if quick:
        if exit_code or retrain:
            raise UserError("--quick gives no verdict and needs no retraining: drop --exit-code and --retrain")
        if len(request) > 1:
            raise UserError("--quick takes one result: name one --request")
        from ease.commands.audit import quick_run

        return quick_run(run, request[0], quiet)
    from ease.audit.config import AuditConfig
    from ease.commands.audit import audit_run, audits_run
    from ease.config import validate

    values = {"shadows": shadows, "retrains": retrains, "fpr": fpr, "pool": pool, "workers": workers, "attack": attack}
    config = validate(AuditConfig, values, "ease audit")
    if len(request) > 1:
        audits = audits_run(run, request, config, retrain, quiet)
        return audits, audits.exit_code if exit_code else 0
    summary = audit_run(run, request[0], config, retrain, quiet)
    return summary, summary.exit_code if exit_code else 0
