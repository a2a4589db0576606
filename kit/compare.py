"""Runs side by side: one table, their losses in one chart, and the forecast beside what happened."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kit import files
from kit.chart import Chart, Line
from kit.data import Dataset
from kit.metrics import Metrics
from kit.run import Run
from kit.slurm import state
from kit.timing import predict


def result(run: Run) -> dict[str, Any]:
    """What training left when it ended well: steps, losses, seconds a step, peak memory; empty before."""
    path = run.path / "state" / "result.json"
    return dict(files.read_json(path)) if path.exists() else {}


def table(runs: Sequence[Run]) -> Any:
    """A DataFrame, one row a run: state, what was trained, and the losses."""
    import pandas as pd

    rows = []
    for run in runs:
        recipe, left = run.recipe, result(run)
        rows.append(
            {
                "run": run.path.name,
                "state": state(run).state,
                "method": recipe.tuning.method,
                "ranks": recipe.world_size,
                "lr": recipe.schedule.lr,
                "steps": left.get("steps"),
                "loss": left.get("loss"),
                "eval before": left.get("eval_loss_before"),
                "eval after": left.get("eval_loss_after"),
            }
        )
    return pd.DataFrame(rows)


def losses(runs: Sequence[Run]) -> Chart:
    """Train and eval loss of each run over its optimizer steps."""
    lines = []
    for run in runs:
        metrics = Metrics(run.path)
        while metrics.poll():
            pass
        for key, name in (("train/loss", "train"), ("eval/loss", "eval")):
            if key in metrics.series:
                x, y = metrics.series[key][:2]
                lines.append(Line(f"{run.path.name} {name}", x, y))
    return Chart("Loss", "optimizer step", "loss (nats a token)", lines)


def forecasts(runs: Sequence[Run]) -> Any:
    """A DataFrame: seconds a step and peak GiB as forecast from the frozen recipe, and as measured."""
    import pandas as pd

    rows = []
    for run in runs:
        left = result(run)
        foreseen = predict(run.recipe, run.cluster, Dataset(Path(run.info["dataset"])).manifest)
        rows.append(
            {
                "run": run.path.name,
                "s a step, forecast": foreseen.time.step_s,
                "s a step, measured": left.get("step_s"),
                "peak GiB, forecast": foreseen.memory.allocated_gib,
                "peak GiB, measured": left.get("peak_gib"),
            }
        )
    return pd.DataFrame(rows).round(3)
