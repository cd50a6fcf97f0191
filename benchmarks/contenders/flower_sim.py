"""Flower's simulation over Ray: FedAvg, NumPy clients, one processor for each virtual client. One run, then it ends.

python flower_sim.py FOLDER THREADS
"""

import json
import logging
import os
import sys
import time
from itertools import pairwise
from pathlib import Path

HERE, FOLDER, THREADS = Path(__file__).parent, Path(sys.argv[1]), int(sys.argv[2])
os.environ |= {  # Ray's processes inherit it
    "EASE_CONTENDER": str(FOLDER),
    "PYTHONPATH": str(HERE),
    "OMP_NUM_THREADS": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}

import torch  # noqa: E402
from flower_app import APPS, ENDS, LAST, work  # noqa: E402
from flwr.common import parameters_to_ndarrays  # noqa: E402
from flwr.simulation import run_simulation  # noqa: E402
from work import write_weights  # noqa: E402


def main() -> None:
    logging.getLogger("flwr").setLevel(logging.ERROR)
    own = work()
    began = time.perf_counter()
    run_simulation(
        server_app=APPS[0],
        client_app=APPS[1],
        num_supernodes=len(own.pairs),
        backend_config={
            "init_args": {"num_cpus": THREADS, "log_to_driver": False, "include_dashboard": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
    whole = time.perf_counter() - began
    weights = dict(zip(own.start, map(torch.from_numpy, parameters_to_ndarrays(LAST[0])), strict=True))
    write_weights(FOLDER / "flower.npz", weights)
    seconds = [after - before for before, after in pairwise(ENDS)]
    print(json.dumps({"seconds": seconds, "whole": whole}), flush=True)


if __name__ == "__main__":
    main()
