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
    example,
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


@app.command(rich_help_panel=CLUSTER, epilog=example("kit check --write cluster.toml"))
def check(
    cluster: Annotated[str, typer.Option(help="Cluster profile, or the name of a shipped one (default local).")] = "",
    nodes: Annotated[int | None, typer.Option(help="Nodes to inspect with a small job (0: no job).")] = None,
    write: Annotated[str, typer.Option(metavar="FILE", help="Write the profile with the facts that it lacks.")] = "",
    probe: Annotated[str, typer.Option(metavar="FILE", help="Measure GPUs and links in a job; write a profile.")] = "",
    trainer: Annotated[str, typer.Option(help="Only compare versions in the environment of this trainer.")] = "",
    python: Annotated[str, typer.Option(help="The python of that environment.")] = "",
    as_json: Json = False,
) -> None:
    """Survey this cluster; exit 1 where its profile and the machines disagree."""
    if trainer:
        from kit.trainers.installed import report

        answer, known = report(trainer, python)
        emit(answer, as_json)
        finish(not known)
        return
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


@app.command(rich_help_panel=CLUSTER)
def clusters(as_json: Json = False) -> None:
    """List the cluster profiles that can be given by name."""
    from kit.config.shipped import clusters as all_clusters

    emit(all_clusters(), as_json)


@app.command(rich_help_panel=JOBS, epilog=example("kit lint job.sbatch --cluster cluster.toml"))
def lint(
    scripts: Annotated[list[Path], typer.Argument(metavar="SCRIPT...")],
    cluster: Annotated[str, typer.Option(help="Cluster profile, for rules that need to know the cluster.")] = "",
    fix: Annotated[bool, typer.Option("--fix", help="Write the safe fixes into the scripts.")] = False,
    as_json: Json = False,
) -> None:
    """Check sbatch scripts, and config files of DeepSpeed (.json); exit 1 where there is an error."""
    from kit.lint.fixes import fix_file
    from kit.slurm.linting import lint_scripts

    profile = load_cluster(cluster) if cluster else None
    if fix:
        for script in scripts:
            fix_file(script)
    report = lint_scripts(scripts, profile)
    emit(report, as_json)
    finish(bool(report.errors))


@app.command(
    rich_help_panel=JOBS, epilog=example("kit launch recipe.toml --cluster cluster.toml -s schedule.lr=1e-4 --dry-run")
)
def launch(
    recipe: RecipeName,
    overrides: Overrides = None,
    cluster: ClusterName = "local",
    wait: Annotated[bool, typer.Option("--wait", help="Stay until it ends; exit with the job's exit code.")] = False,
    anyway: Annotated[bool, typer.Option("--anyway", help="Launch what the forecast says does not fit.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and the script; submit nothing.")] = False,
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
    if job.trainer.is_other:
        from kit.slurm.plan import trainer_facts

        warn(trainer_facts(job, machines)["trainer"])
    run = slurm.launch(job, machines, anyway=anyway, after=find_run(after) if after else None, when=when.value)
    emit(run, as_json)
    if not wait:
        warn(f"next: kit watch {run.name}    (its end: kit state {run.name}; to end it: kit cancel {run.name})")
        return
    effect = "ends" if run.is_local else "leaves"
    warn(f"Waiting. `kit watch {run.path.name}` shows the run; Ctrl-C {effect} it.")
    end = run.wait()
    warn(f"{end.state}{': ' + end.cause if end.cause else ''}")
    raise typer.Exit(0 if end.state == "COMPLETED" else end.exit_code or 1)


@app.command(rich_help_panel=JOBS)
def render(
    recipe: RecipeName,
    out: Annotated[Path, typer.Argument(help="New folder.")],
    overrides: Overrides = None,
    cluster: ClusterName = "local",
    trainer: Annotated[str, typer.Option(help="Another trainer than the recipe's, such as litgpt.")] = "",
    as_json: Json = False,
) -> None:
    """Write another trainer's configuration, its data and a job script."""
    from kit.slurm.render import render as render_folder

    emit(render_folder(load_recipe(recipe, overrides), load_cluster(cluster), out, trainer), as_json)


@app.command(rich_help_panel=JOBS)
def runs(
    everyone: Annotated[bool, typer.Option("--all", help="Also those of other users in the same folders.")] = False,
    as_json: Json = False,
) -> None:
    """List your runs, newest first, with step, loss and age."""
    from kit.watch.runs import runs as all_runs

    emit(all_runs(everyone), as_json)


@app.command(rich_help_panel=JOBS, epilog=example("kit state latest"))
def state(run: RunName, as_json: Json = False) -> None:
    """Show how a run is, why it waits, or how it ended and why."""
    emit(find_run(run).state, as_json)


@app.command(rich_help_panel=JOBS, epilog=example("kit tail latest --rank 3 --follow"))
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


@app.command(rich_help_panel=JOBS, epilog=example("kit watch latest"))
def watch(
    run: Annotated[list[str], typer.Argument(metavar="RUN...", help="Run, W&B log or folder, or entity/project/run.")],
    alert: Annotated[str, typer.Option(metavar="COMMAND", help="Run for each alert, with its text appended.")] = "",
    once: Annotated[bool, typer.Option("--once", help="Print the present state and exit.")] = False,
    html: Annotated[str, typer.Option(metavar="FILE", help="Write a page that needs nothing else.")] = "",
) -> None:
    """Show loss and every GPU of every node until the run ends; on a terminal full-screen, with keys."""
    from kit.watch.board import watch as board_of

    board = board_of(*run, on_alert=shlex.split(alert), page=html)
    if board.refused:
        raise InputError(board.refused)
    if once:
        emit(board, as_json=False)
        board.finish()
        return
    if sys.stdin.isatty() and sys.stdout.isatty():
        from kit.watch.terminal import show

        show(board)
        board.finish()
        print(board.status())
        return
    while not board.ended:
        warn(board.status())
        board.wait(30)
    emit(board, as_json=False)
