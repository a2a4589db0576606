"""`kit check`, `lint`, `launch`, `runs`, `state`, `tail`, `cancel`, `requeue`, `watch`: the cluster and its jobs."""

import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kit.cli.base import (
    SETTINGS,
    ClusterName,
    Json,
    Overrides,
    RecipeName,
    RunName,
    Task,
    emit,
    find_run,
    finish,
    load_cluster,
    load_recipe,
    warn,
)
from kit.errors import InputError

app = typer.Typer(**SETTINGS)
CLUSTER, JOBS = "Cluster", "Jobs"


class When(StrEnum):
    """How the run that `kit launch --after` names must have ended."""

    OK = "ok"
    ANY = "any"


@app.command(rich_help_panel=CLUSTER)
def check(
    cluster: Annotated[str, typer.Option(help="Cluster profile, or the name of a shipped one (default local).")] = "",
    nodes: Annotated[int | None, typer.Option(help="Nodes to inspect with a small job (0: no job).")] = None,
    write: Annotated[str, typer.Option(metavar="FILE", help="Write the profile with the facts that it lacks.")] = "",
    probe: Annotated[str, typer.Option(metavar="FILE", help="Measure GPUs and links in a job; write a profile.")] = "",
    as_json: Json = False,
) -> None:
    """Survey this cluster; exit 1 where its profile and the machines disagree."""
    from kit.check.profile import fill, start_profile
    from kit.check.survey import survey
    from kit.config import schema
    from kit.files import write as write_file

    base = schema.find(cluster or "local", "clusters") if cluster or not write else None
    text, profile = start_profile(Path(write), base) if write else ("", load_cluster(cluster or "local"))
    if probe:
        from kit.check.probe import measure

        print(measure(profile, Path(probe), warn))
        return
    found = survey(profile, nodes, warn)
    emit(found, as_json)
    if write:
        write_file(Path(write), fill(text, found.facts))
        warn(f"wrote {write}")
    finish(bool(found.problems.rows))


@app.command(rich_help_panel=JOBS)
def lint(
    scripts: Annotated[list[Path], typer.Argument(metavar="SCRIPT...")],
    cluster: Annotated[str, typer.Option(help="Cluster profile, for rules that need to know the cluster.")] = "",
    fix: Annotated[bool, typer.Option("--fix", help="Write the safe fixes into the scripts.")] = False,
    as_json: Json = False,
) -> None:
    """Check sbatch scripts; exit 1 where there is an error."""
    from kit.lint.fixes import fix_file
    from kit.slurm.linting import lint_scripts

    profile = load_cluster(cluster) if cluster else None
    if fix:
        for script in scripts:
            fix_file(script)
    report = lint_scripts(scripts, profile)
    emit(report, as_json)
    finish(bool(report.errors))


@app.command(rich_help_panel=JOBS)
def launch(
    recipe: RecipeName,
    overrides: Overrides = None,
    cluster: ClusterName = "local",
    wait: Annotated[bool, typer.Option("--wait", help="Stay until it ends; exit with the job's exit code.")] = False,
    anyway: Annotated[bool, typer.Option("--anyway", help="Launch what the forecast says does not fit.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan; submit nothing.")] = False,
    after: Annotated[str, typer.Option(metavar="RUN", help="Start when that run has ended.")] = "",
    when: Annotated[When, typer.Option(help="How that run must have ended.")] = When.OK,
    as_json: Json = False,
) -> None:
    """Freeze recipe and cluster, submit the job, return at once."""
    from kit.slurm import launch as slurm

    job, machines = load_recipe(recipe, overrides), load_cluster(cluster)
    if dry_run:
        from kit.slurm.plan import plan

        emit(plan(job, machines), as_json)
        return
    run = slurm.launch(job, machines, anyway=anyway, after=find_run(after) if after else None, when=when.value)
    emit(run, as_json)
    if not wait:
        return
    effect = "ends" if run.is_local else "leaves"
    warn(f"Waiting. `kit watch {run.path.name}` shows the run; Ctrl-C {effect} it.")
    end = run.wait()
    warn(f"{end.state}{': ' + end.cause if end.cause else ''}")
    raise typer.Exit(0 if end.state == "COMPLETED" else end.exit_code or 1)


@app.command(rich_help_panel=JOBS)
def runs(as_json: Json = False) -> None:
    """List every run, newest first."""
    from kit.slurm.runs import runs as all_runs

    emit(all_runs(), as_json)


@app.command(rich_help_panel=JOBS)
def state(run: RunName, as_json: Json = False) -> None:
    """Show how a run is, why it waits, or how it ended and why."""
    emit(find_run(run).state, as_json)


@app.command(rich_help_panel=JOBS)
def tail(
    run: RunName,
    rank: Annotated[list[int] | None, typer.Option(metavar="N", help="Only this rank; may be repeated.")] = None,
    lines: Annotated[int, typer.Option("-n", min=0, help="Lines of each log.")] = 20,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the run ends; Ctrl-C leaves it.")] = False,
) -> None:
    """Show the ends of the job's log and of every rank's log."""
    found = find_run(run)
    if not follow:
        print(found.tail(rank, lines))
        return
    for line in found.follow(rank, lines):
        print(line, flush=True)


@app.command(rich_help_panel=JOBS)
def cancel(run: RunName, task: Task = None) -> None:
    """End a run."""
    find_run(run).cancel(task)


@app.command(rich_help_panel=JOBS)
def requeue(run: RunName, task: Task = None) -> None:
    """Start a run again from its newest complete checkpoint."""
    found = find_run(run)
    found.requeue(task)
    warn(f"{found.path.name} starts again as job {found.job_id}")


@app.command(rich_help_panel=JOBS)
def watch(
    run: Annotated[list[str], typer.Argument(metavar="RUN...", help="Run, W&B log or folder, or entity/project/run.")],
    alert: Annotated[str, typer.Option(metavar="COMMAND", help="Run for each alert, with its text appended.")] = "",
    once: Annotated[bool, typer.Option("--once", help="Print the present state and exit.")] = False,
    html: Annotated[str, typer.Option(metavar="FILE", help="Write a page that needs nothing else.")] = "",
) -> None:
    """Show loss and every GPU of every node until the run ends."""
    from kit.files import write
    from kit.watch.board import watch as board_of

    board = board_of(*run, on_alert=shlex.split(alert))
    if board.refused:
        raise InputError(board.refused)
    terminal = sys.stderr.isatty()
    while not once and not board.ended:
        warn(f"\x1b[H\x1b[2J{board}" if terminal else board.status())
        board.wait(2 if terminal else 30)
    emit(board, as_json=False)
    if html:
        write(Path(html), board.html())
