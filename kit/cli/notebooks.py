"""`kit demo`, `run`, `sweep`, `replay`: notebooks without a browser."""

from pathlib import Path
from typing import Annotated, Any

import typer

from kit.cli.base import SETTINGS, ClusterName, Json, emit, example, find_run, finish, load_cluster, pairs, warn
from kit.errors import InputError

app = typer.Typer(**SETTINGS)
NOTEBOOKS = "Notebooks"


@app.command(rich_help_panel=NOTEBOOKS)
def demo(
    out: Annotated[Path, typer.Option(help="Folder for notebooks and run.")] = Path("demo"),
) -> None:
    """Run every notebook headless on the embedded default."""
    from kit.notebook.demo import demo as run_demo

    print(run_demo(out))


@app.command(
    rich_help_panel=NOTEBOOKS,
    epilog=example("kit run notebooks/02_explore_memory.ipynb out.ipynb -p recipe=llama8b -p cluster=h100-8x8"),
)
def run(
    notebook: Path,
    out: Path,
    parameters: Annotated[list[str] | None, typer.Option("-p", metavar="NAME=VALUE", help="A parameter.")] = None,
    file: Annotated[str, typer.Option("-f", metavar="PARAMS.yaml", help="A file of parameters.")] = "",
    cluster: Annotated[str, typer.Option(help="Run as a job of this cluster; returns at once.")] = "",
) -> None:
    """Execute a notebook; the exit code is 124 after a time-out and 128 + the signal where one ended it."""
    from kit.notebook.parameters import read_values
    from kit.notebook.values import Text

    given: dict[str, Any] = read_values(Path(file)) if file else {}
    given |= {name: Text(value) for name, value in pairs(parameters).items()}
    if cluster:
        from kit.notebook.sweep import submit_notebook

        made = submit_notebook(notebook, given, out, load_cluster(cluster))
        print(f"{made.path}\njob {made.job_id}")
        return
    from kit.notebook.execute import execute

    print(execute(notebook, out, given))


@app.command(
    rich_help_panel=NOTEBOOKS, epilog=example("kit sweep recipe.toml grid.toml --cluster cluster.toml --limit 4")
)
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
    from kit.notebook.grid import read_grid
    from kit.notebook.sweep import Sweep
    from kit.notebook.sweep import sweep as start

    if rerun:
        found = Sweep(find_run(rerun))
        warn(f"submitted again: {', '.join(map(str, found.rerun())) or 'none; all completed'}")
    elif grid:
        found = start(what, read_grid(Path(grid)), load_cluster(cluster), limit)
    else:
        raise InputError("kit sweep takes a notebook or a recipe, and a grid; or --rerun and a sweep.")
    warn(f"{found.run.path}, job {found.run.job_id}")
    if wait:
        found.run.wait()
    emit(found, as_json)
    finish(wait and not all(task.completed for task in found.tasks()))


@app.command(rich_help_panel=NOTEBOOKS, epilog=example("kit replay out.ipynb again.ipynb"))
def replay(
    executed: Path,
    out: Path,
    anyway: Annotated[bool, typer.Option("--anyway", help="Also where the notebook has changed since.")] = False,
    as_json: Json = False,
) -> None:
    """Execute a notebook again as its copy records, and compare; exit 1 where the results differ."""
    from kit.notebook.replay import replay as run_again

    found = run_again(executed, out, anyway)
    emit(found, as_json)
    finish(not found.same)
