"""`kit demo`, `run`, `sweep`, `replay`: notebooks without a browser."""

from pathlib import Path
from typing import Annotated, Any

import typer

from kit.cli.base import SETTINGS, ClusterName, Json, emit, find_run, finish, load_cluster, pairs, warn
from kit.errors import InputError
from kit.show import Answer, Table

app = typer.Typer(**SETTINGS)
NOTEBOOKS = "Notebooks"


@app.command(rich_help_panel=NOTEBOOKS)
def demo(
    out: Annotated[Path, typer.Option(help="Folder for notebooks and run.")] = Path("demo"),
) -> None:
    """Run every notebook headless on the embedded default."""
    from kit.notebook.demo import demo as run_demo

    raise typer.Exit(run_demo(out))


@app.command(rich_help_panel=NOTEBOOKS)
def run(
    notebook: Path,
    out: Path,
    parameters: Annotated[list[str] | None, typer.Option("-p", metavar="NAME=VALUE", help="A parameter.")] = None,
    file: Annotated[str, typer.Option("-f", metavar="PARAMS.yaml", help="A file of parameters.")] = "",
    cluster: Annotated[str, typer.Option(help="Run as a job of this cluster; returns at once.")] = "",
) -> None:
    """Execute a notebook; the exit code is 124 after a time-out and 128 + the signal where one ended it."""
    from kit.notebook.parameters import read_values

    given: dict[str, Any] = read_values(Path(file)) if file else {}
    given |= pairs(parameters)
    if cluster:
        from kit.notebook.sweep import job

        made = job(notebook, given, out, load_cluster(cluster))
        print(f"{made.path}\njob {made.job_id}")
        return
    from kit.notebook.execute import execute

    print(execute(notebook, out, given, say=warn))


@app.command(rich_help_panel=NOTEBOOKS)
def sweep(
    what: Annotated[str, typer.Argument(metavar="NOTEBOOK|RECIPE")] = "",
    grid: Annotated[str, typer.Argument(metavar="GRID.toml", help="Lists span a product; [[points]] are single.")] = "",
    cluster: ClusterName = "local",
    limit: Annotated[int, typer.Option(help="At most this many tasks at once (0: all).")] = 0,
    wait: Annotated[bool, typer.Option("--wait", help="Stay until all have ended; exit 1 where one failed.")] = False,
    rerun: Annotated[str, typer.Option(metavar="SWEEP", help="Submit the failed tasks of this sweep again.")] = "",
    as_json: Json = False,
) -> None:
    """Run a notebook or a recipe at many settings, as one Slurm array."""
    from kit.notebook.parameters import label, read_grid
    from kit.notebook.sweep import rerun as submit_again
    from kit.notebook.sweep import sweep as start
    from kit.notebook.sweep import tasks

    if rerun:
        made = find_run(rerun)
        warn(f"submitted again: {', '.join(map(str, submit_again(made))) or 'none; all ended well'}")
    elif grid:
        made = start(what, read_grid(Path(grid)), load_cluster(cluster), limit)
    else:
        raise InputError("kit sweep takes a notebook or a recipe, and a grid; or --rerun and a sweep.")
    warn(f"{made.path}, job {made.job_id}")
    if wait:
        made.wait()
    found = tasks(made)
    rows = [{"task": t.number, "values": t.values, "out": str(t.out), "state": t.state} for t in found]
    shown = [(t.number, t.state, label(t.values), t.out.relative_to(made.path)) for t in found]
    table = Table(("task", "state", "values", "out"), shown)
    emit(Answer({"sweep": str(made.path), "job_id": made.job_id, "tasks": rows}, table), as_json)
    finish(wait and any(task.state != "COMPLETED" for task in found))


@app.command(rich_help_panel=NOTEBOOKS)
def replay(
    executed: Path,
    out: Path,
    anyway: Annotated[bool, typer.Option("--anyway", help="Also where the notebook has changed since.")] = False,
    as_json: Json = False,
) -> None:
    """Execute a notebook again as its copy records, and compare; exit 1 where the results differ."""
    from kit.notebook.replay import replay as run_again

    found = run_again(executed, out, anyway)
    lines = ["the results are the same, to the bit" if found["same"] else "the results differ", *found["results"]]
    lines += [f"{reason}: {text}" for reason, texts in found["reasons"].items() for text in texts]
    emit(Answer(found, *lines), as_json)
    finish(not found["same"])
