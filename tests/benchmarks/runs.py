"""Many runs in one folder: `python tests/benchmarks/runs.py [RUNS]` writes runs.json to the folder of this file.

Each run is a copy of one that trained, with its own learning rate, losses and a W&B log that the real SDK wrote. Timed
in new processes: `kit runs`, and the calls of notebook 06 (`kit.compare`, its tables and figures).
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
LOGGED_ROWS = 150
WRITER = """
import sys, wandb
run = wandb.init(project="p", id="seg", mode="offline", dir=sys.argv[1])
for step in range(1, int(sys.argv[2]) + 1):
    run.log({"train/loss": 2.0 / step, "train/global_step": step, "eval/loss": 3.0 / step, "train/lr": 1e-4})
run.finish()
"""
COMPARE = """
import resource, sys, time
start = time.monotonic()
import kit
found = kit.compare(sys.argv[1], None, progress=True)
for part in (found.groups(), found.table(), found.losses(), found.losses("eval"), found.forecasts()):
    part._repr_mimebundle_()
print(len(found.entries), time.monotonic() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


def make_runs(folder: Path, count: int) -> None:
    """Runs of the demo's recipe that completed, in this folder."""
    from dataclasses import replace

    import kit
    from kit import files
    from kit.data.dataset import prepare
    from kit.slurm import ledger
    from kit.slurm.run import Run
    from kit.slurm.states import JobState, SlurmRecord

    recipe, cluster = kit.Recipe.load("demo"), kit.Cluster.load("local")
    cluster = replace(cluster, paths=replace(cluster.paths, runs=str(folder)))
    data = prepare(recipe)
    first = Run.create(recipe, cluster, data.path, data.manifest["digest"])
    subprocess.run(
        [sys.executable, "-c", WRITER, str(first.path), str(LOGGED_ROWS)],
        env=os.environ | {"WANDB_SILENT": "true"}, check=True,
    )  # fmt: skip
    for number in range(count):
        job = recipe.override(**{"schedule.lr": f"{1e-5 * (number + 1):.6g}"})
        path = folder / f"{first.name}-{number:05}"
        shutil.copytree(first.path, path, symlinks=True)
        files.write(path / "recipe.toml", job.toml())
        job_id, now = str(100_000 + number), time.time()
        facts = {"name": path.name, "job_id": job_id, "submitted": now - 3800}
        files.write_json(path / "run.json", files.read_json(path / "run.json") | facts)
        start, end = {"nodes": "n"}, {"exit_code": 0, "signal": ""}
        for kind, ago, fact in (("start", 3700, start), ("exit", 100, end)):
            record = {"job_id": job_id, "time": now - ago, **fact}
            files.write_json(path / "state" / f"{kind}.0.json", record)
        (path / "logs" / f"slurm-{job_id}.out").write_text("a line of a log\n" * 2000)
        said = SlurmRecord(time=now - 90, job_id=job_id, state=JobState.COMPLETED, exit_code=0)
        ledger.append(Run(path), said)
        loss = 2.0 + number * 1e-4
        result = {"steps": LOGGED_ROWS, "loss": loss, "eval_loss_after": loss - 0.5, "step_s": 3}
        files.write_json(path / "state" / "result.json", result)
    shutil.rmtree(first.path)


def timed(*command: str, **options: object) -> tuple[float, str]:
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=True, **options)
    return round(time.monotonic() - start, 2), done.stdout


def main(count: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ |= {"XDG_STATE_HOME": str(folder / "state"), "PYTHONPATH": str(REPOSITORY)}
        os.chdir(folder)
        make_runs(folder / "runs", count)
        listed = [timed(sys.executable, "-m", "kit.cli", "runs", "--json") for _ in range(3)]
        compared = [timed(sys.executable, "-c", COMPARE, str(folder / "runs")) for _ in range(2)]
    assert len(json.loads(listed[0][1])["runs"]) == count
    entries, calls, memory = compared[0][1].split()
    assert int(entries) == count
    found = {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f}",
        "runs": count,
        "kit_runs_s": [seconds for seconds, _ in listed],
        "compare_s": [seconds for seconds, _ in compared],
        "compare_calls_s": round(float(calls), 2),
        "compare_memory_mb": round(float(memory)),
    }
    Path(__file__).with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    sys.path.insert(0, str(REPOSITORY))
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2000)
