"""`kit demo`, `run`, `sweep`, `replay`: notebooks without a browser."""

import argparse
from pathlib import Path
from typing import Any

from kit.command import Commands, add, pairs, say, show
from kit.config.cluster import Cluster
from kit.errors import InputError


def register(commands: Commands) -> None:
    """These commands' parsers."""
    one = add(commands, "demo", demo, "run every notebook headless on the embedded default")
    one.add_argument("--out", default="demo")
    one = add(commands, "run", run_notebook, "execute a notebook; its end is told truthfully")
    one.add_argument("notebook")
    one.add_argument("out")
    one.add_argument("-p", dest="parameters", action="append", default=[], metavar="NAME=VALUE")
    one.add_argument("-f", dest="file", metavar="PARAMS.yaml")
    one.add_argument("--cluster", help="as a job of this cluster; its run is printed at once")
    one = add(
        commands, "sweep", sweep, "a notebook or a recipe at many settings, as one Slurm array", "cluster", "json"
    )
    one.add_argument("what", nargs="?", metavar="NOTEBOOK|RECIPE")
    one.add_argument("grid", nargs="?", metavar="GRID.toml", help="lists span a product; [[points]] come one by one")
    one.add_argument("--limit", type=int, default=0, help="at most this many tasks at once")
    one.add_argument("--wait", action="store_true", help="stay until all have ended; exit 1 where one did not end well")
    one.add_argument("--rerun", metavar="SWEEP", help="submit the tasks of this sweep again that did not end well")
    one = add(commands, "replay", replay, "execute a notebook again as its copy says, and compare", "json")
    one.add_argument("executed")
    one.add_argument("out")
    one.add_argument("--anyway", action="store_true", help="also where the notebook has changed since")


def demo(options: argparse.Namespace) -> int:
    """`kit demo`: all notebooks, end to end."""
    from kit.notebook.demo import demo as run_demo

    return run_demo(Path(options.out))


def run_notebook(options: argparse.Namespace) -> int:
    """`kit run`: here, or with --cluster as a job."""
    from kit.notebook.parameters import read_values

    given: dict[str, Any] = {}
    if options.file:
        given |= read_values(Path(options.file))
    given |= pairs(options.parameters)
    notebook, out = Path(options.notebook), Path(options.out)
    if options.cluster:
        from kit.notebook.sweep import job

        run = job(notebook, given, out, Cluster.load(options.cluster))
        print(f"{run.path}\njob {run.job_id}")
        return 0
    from kit.notebook.execute import execute

    print(execute(notebook, out, given, say=say))
    return 0


def sweep(options: argparse.Namespace) -> int:
    """`kit sweep`: with --wait, exit 1 where a task did not end well."""
    from kit.notebook.parameters import label, read_grid
    from kit.notebook.sweep import rerun, tasks
    from kit.notebook.sweep import sweep as start
    from kit.slurm import launch as slurm
    from kit.slurm.run import Run

    if options.rerun:
        run = Run.attach(options.rerun)
        say(f"submitted again: {', '.join(map(str, rerun(run))) or 'none; all ended well'}")
    elif options.grid:
        run = start(options.what, read_grid(Path(options.grid)), Cluster.load(options.cluster), options.limit)
    else:
        raise InputError("kit sweep takes a notebook or a recipe, and a grid; or --rerun and a sweep.")
    say(f"{run.path}, job {run.job_id}")
    if options.wait:
        slurm.wait(run)
    found = tasks(run)
    rows = [{"task": t.number, "values": t.values, "out": str(t.out), "state": t.state} for t in found]
    lines = [f"{t.number:4} {t.state:13} {label(t.values)}  {t.out.relative_to(run.path)}" for t in found]
    show(options, {"sweep": str(run.path), "job_id": run.job_id, "tasks": rows}, lines)
    return int(options.wait and any(t.state != "COMPLETED" for t in found))


def replay(options: argparse.Namespace) -> int:
    """`kit replay`: exit 1 where the results differ."""
    from kit.notebook.replay import replay as run_again

    found = run_again(Path(options.executed), Path(options.out), options.anyway)
    lines = ["the results are the same, to the bit" if found["same"] else "the results differ", *found["results"]]
    lines += [f"{reason}: {text}" for reason, texts in found["reasons"].items() for text in texts]
    show(options, found, lines)
    return int(not found["same"])
