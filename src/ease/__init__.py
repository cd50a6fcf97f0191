"""Federated unlearning for image-text models: train, forget, and show that it is forgotten."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ease.api import Answer, TrainedRun, Verdict, open_run, train
    from ease.api.studies import Results, bench, compare, leaderboard, open_results, sweep
    from ease.errors import UserError
    from ease.events import Event, tracking
    from ease.methods.base import Step, Trained, Unlearner
    from ease.runs.config import RunConfig, load_config

__version__ = "0.1.0"

_HOMES = {
    "ease.api": ("Answer", "TrainedRun", "Verdict", "open_run", "train"),
    "ease.api.studies": ("Results", "bench", "compare", "leaderboard", "open_results", "sweep"),
    "ease.errors": ("UserError",),
    "ease.methods.base": ("Step", "Trained", "Unlearner"),
    "ease.runs.config": ("RunConfig", "load_config"),
    "ease.events": ("Event", "tracking"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Answer",
    "Event",
    "Results",
    "RunConfig",
    "Step",
    "Trained",
    "TrainedRun",
    "Unlearner",
    "UserError",
    "Verdict",
    "__version__",
    "bench",
    "compare",
    "leaderboard",
    "load_config",
    "open_results",
    "open_run",
    "sweep",
    "tracking",
    "train",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for: `import ease` alone must not load torch."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'ease' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
