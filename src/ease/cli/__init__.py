"""The command line: one module for each command, with its options and help, over one function of `ease.commands`."""

from ease.cli.entry import EXIT_CODES, INTERRUPTED, USER_ERROR, main
from ease.cli.options import REFUTED
from ease.cli.registry import commands, program

__all__ = ["EXIT_CODES", "INTERRUPTED", "REFUTED", "USER_ERROR", "commands", "main", "program"]
