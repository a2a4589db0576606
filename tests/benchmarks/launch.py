"""Submit to handle, and attach from a new kernel: `python tests/benchmarks/launch.py` writes launch.json beside itself.

On a two-node Slurm that env/slurm/up starts on this machine. The handle is `launch_script`'s answer: run folder,
sbatch, the watcher enlisted. Attaching is a new Python that imports the kit, finds the run by job id, tells its state.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
ATTACH = "import sys; from kit.slurm.run import Run; print(Run.attach(sys.argv[1]).state.state)"


def measured(seconds):
    """Median and range, in seconds."""
    return {
        "median_s": round(statistics.median(seconds), 3), "range_s": [round(min(seconds), 3), round(max(seconds), 3)],
        "n": len(seconds),
    }  # fmt: skip


def main():
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["bash", REPOSITORY / "env/slurm/up", f"{folder}/slurm"], check=True, stdout=subprocess.DEVNULL)
        os.environ |= {"SLURM_CONF": f"{folder}/slurm/slurm.conf", "XDG_STATE_HOME": f"{folder}/state"}
        os.environ["PYTHONPATH"] = str(REPOSITORY)
        os.chdir(folder)
        from kit.config.cluster import Cluster
        from kit.slurm import launch as slurm

        submits, attaches = [], []
        try:
            for _ in range(15):
                start = time.monotonic()
                run = slurm.launch_script("#!/bin/bash\n#SBATCH --mem=10\nsleep 2\n", Cluster("bench"), "bench")
                submits.append(time.monotonic() - start)
                start = time.monotonic()
                subprocess.run([sys.executable, "-c", ATTACH, run.job_id], check=True, stdout=subprocess.DEVNULL)
                attaches.append(time.monotonic() - start)
        finally:
            subprocess.run(["bash", REPOSITORY / "env/slurm/down", f"{folder}/slurm"], check=True)
    found = {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f}",
        "submit_to_handle": measured(submits), "attach_from_a_new_kernel": measured(attaches),
    }  # fmt: skip
    Path(__file__).with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    sys.path.insert(0, str(REPOSITORY))
    main()
