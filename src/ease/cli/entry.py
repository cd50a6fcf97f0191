"""The entry point of `ease`: runs a command and turns user errors, interrupts and too little memory into exit codes."""

import io
import os
import re
import signal
import sys
import threading
from pathlib import Path

import click

from ease.cli.options import REFUTED
from ease.cli.registry import program
from ease.errors import UserError

INTERRUPTED = 130
"""Exit code of a process that Ctrl-C ended."""
USER_ERROR = 2
"""Exit code of an error that the user can fix."""

EXIT_CODES = {
    0: "Success. `verify` and `certificate sign`: nothing contradicts the certificate. `doctor`: everything works. "
    "`audit --exit-code`: passed.",
    REFUTED: "`verify` and `certificate sign`: the certificate is refused, with each reason. `doctor`: something does "
    "not work. `audit --exit-code`: not passed. With a traceback: a fault of this program.",
    USER_ERROR: "A user error in the command, its settings or its files, or too little disk or memory. One line says "
    "what is wrong and what to do.",
    3: "`audit --exit-code`: undecided.",
    4: "`request due`: something is due soon. `status --exit-code`: a request waits. `work`: a "
    "request is held or pending.",
    5: "`request due` and `status --exit-code`: something is overdue.",
    INTERRUPTED: "Stopped by Ctrl-C. Run the same command again to resume.",
}
"""Every exit code of a command, for the reference."""

LACK = re.compile(
    r"allocate memory|out of memory|bad alloc|start new thread|failed to map segment|std::bad_alloc|exception set",
    re.I,
)
"""Messages of Python, torch, the dynamic loader and CUDA, and of C code that continued after a failed allocation."""
OUT_OF_MEMORY = (
    "not enough memory: close other programs, raise the limit (ulimit -v) or reduce the work "
    "(training.batch_size, gallery, fewer pairs); --debug shows where it ran out"
)
LEAST_MEMORY = 1 << 30
"""Bytes of address space that torch needs to load. With less it fails anywhere, or hangs."""


def main() -> None:
    """Run a command; user errors print one line and exit with code 2."""
    # A terminal or a pipe may lack some of our characters, which are then question marks.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="replace")
    # Waiting threads spin by default. On a busy machine a spinning thread holds the core that the thread it waits for
    # needs, which multiplies the processor time. OpenMP reads this when torch is loaded, in child processes too.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    interrupted = _watch_interrupts()
    try:
        _check_memory()
        _check_here()
        code = program()(prog_name="ease", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        code = USER_ERROR
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        if interrupted:  # compiled code may turn an interrupt into an error of its own
            code = INTERRUPTED
        elif isinstance(error, UserError | click.ClickException | OSError):
            _print_error(error)
            code = USER_ERROR
        elif isinstance(error, MemoryError | RuntimeError | ImportError | SystemError) and _lacks_memory(error):
            _print_error(UserError(OUT_OF_MEMORY))
            code = USER_ERROR
        else:
            raise
    if code == INTERRUPTED:
        print("\nstopped; run the same command again to continue", file=sys.stderr)
    raise SystemExit(code if isinstance(code, int) else 0)


def _watch_interrupts() -> list[int]:
    """A list that gets an entry when Ctrl-C is pressed, which still raises KeyboardInterrupt."""
    seen: list[int] = []

    def interrupt(number: int, _: object) -> None:
        seen.append(number)
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, interrupt)  # a shell may ignore it for background jobs
    return seen


def _check_here() -> None:
    """Refuse to run in a folder that was deleted, because relative paths start there."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise UserError("the folder that this terminal is in has been deleted or moved; go to another: cd ~") from None


def _check_memory() -> None:
    """Refuse a memory limit (`ulimit -v`) that is too low for torch, before anything is loaded."""
    try:
        import resource
    except ImportError:  # Windows has no such limits
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < LEAST_MEMORY:
        raise UserError(
            f"not enough memory: the limit is {limit >> 20} MiB (ulimit -v) and loading torch takes more than "
            f"{LEAST_MEMORY >> 20}; raise it"
        )


def _lacks_memory(error: BaseException) -> bool:
    """Whether an error or its cause is a lack of memory or of threads."""
    if isinstance(error, MemoryError) or LACK.search(str(error)):
        return True
    cause = error.__cause__ or error.__context__
    return cause is not None and _lacks_memory(cause)


def _print_error(error: UserError | click.ClickException | OSError) -> None:
    """Print one line on the error stream, whatever the message contains."""
    from rich.text import Text

    from ease.console import errors

    message = error.format_message() if isinstance(error, click.ClickException) else str(error)
    errors.print(
        Text("error: ", style="bold red").append(" ".join(message.split()), style="not bold default"), soft_wrap=True
    )
