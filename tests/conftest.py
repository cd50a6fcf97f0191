"""How tests are run; what they share is in `fixtures`."""

import gc

import pytest

gc.disable()  # until all is imported and collected: nothing of that is garbage, and looking takes a fifth of the time


def pytest_configure(config: pytest.Config) -> None:
    """A process that only hands tests out to others starts them at once: torch takes seconds to import."""
    hands_out = getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput")
    if not hands_out:
        config.pluginmanager.import_plugin("tests.fixtures")


def pytest_collection_finish() -> None:
    gc.freeze()  # what is there now stays; forked processes need not copy it to find that out
    gc.set_threshold(10_000, 20, 20)
    gc.enable()
