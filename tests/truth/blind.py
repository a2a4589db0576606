"""Forecasts that were made before anybody measured: `python tests/truth/blind.py freeze CASES.json` writes blind.json.

The cases are those of measure.py. The file is committed before they run, and never remade afterwards.
"""

import json
import sys
from pathlib import Path
from typing import Any

from kit.cluster import Cluster, Link, Links, Nodes
from kit.files import write_json
from kit.timing import predict
from tests.truth.measure import recipe_of

FOLDER = Path(__file__).resolve().parent
H200 = Cluster(
    "h200",
    Nodes(count=1, gpus=2, gpu="H200", gpu_memory_gib=139.8, gpu_bf16_tflops=989.0, cpus=32, ram_gib=256.0),
    Links(Link("nvlink4", 450.0)),
)


def forecast(case: dict[str, Any], cluster: Cluster = H200) -> dict[str, Any]:
    """Peak allocated and reserved memory of a GPU in GiB, seconds a step, both with their ranges."""
    found = predict(recipe_of(case), cluster)
    memory, time = found.memory, found.time
    return {
        "allocated_gib": memory.allocated_gib, "peak_phase": memory.peak_phase, "reserved_gib": memory.reserved_gib,
        "device_gib": memory.device_gib,
        "step_s": time.step_s, "step_range_s": time.step_range_s, "verdict": memory.verdict,
    }  # fmt: skip


def main(what: str, cases: Path) -> int:
    """Write blind.json, unless it is there."""
    target = FOLDER / "blind.json"
    if what != "freeze" or target.exists():
        sys.exit(__doc__)
    write_json(target, [{"case": case, "forecast": forecast(case)} for case in json.loads(cases.read_text())])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
