"""`kit check`, `lint`, `launch`, `runs`, `state`, `tail`, `cancel`, `requeue`, `watch`: the cluster and its jobs."""

import argparse
import dataclasses
import itertools
import shlex
import sys
from pathlib import Path

from kit.command import Commands, add, recipe_of, say, show
from kit.config.cluster import Cluster
from kit.errors import InputError


def register(commands: Commands) -> None:
    """These commands' parsers."""
    one = add(commands, "check", check, "what this cluster is, and where its profile is wrong", "json")
    one.add_argument("--cluster", help="cluster profile, or the name of a shipped one (local; with --write a new one)")
    one.add_argument("--nodes", type=int, help="nodes that a small job looks at (the profile's count; 0: none)")
    one.add_argument("--write", metavar="FILE", help="write the profile with what it lacks, as FILE")
    one.add_argument("--probe", metavar="FILE", help="measure GPUs and links in a job of minutes; write the profile")
    one = add(commands, "lint", lint, "what is wrong with sbatch scripts", "json")
    one.add_argument("scripts", nargs="+", metavar="SCRIPT")
    one.add_argument("--cluster", help="cluster profile, for what only the cluster knows")
    one.add_argument("--fix", action="store_true", help="write the safe fixes into the scripts")
    one = add(commands, "launch", launch, "freeze, submit, return at once", "recipe", "cluster", "json")
    one.add_argument("--wait", action="store_true", help="stay until it ends; its exit code is this command's")
    one.add_argument("--anyway", action="store_true", help="also where the forecast says that it does not fit")
    one.add_argument("--dry-run", action="store_true", help="show the plan, and submit nothing")
    one.add_argument("--after", metavar="RUN", help="start when that run has ended")
    one.add_argument("--when", choices=("ok", "any"), default="ok", help="it ended well (the default), or in any way")
    add(commands, "runs", runs, "every run that can be found", "json")
    add(commands, "state", state, "how a run is, or how it ended and why", "run", "json")
    one = add(commands, "tail", tail, "the ends of the job's log and of every rank's", "run")
    one.add_argument("--rank", type=int, action="append", metavar="N", help="this rank's alone; may be repeated")
    one.add_argument("-n", type=int, default=20, metavar="LINES", help="lines of each log (20)")
    one.add_argument("--follow", action="store_true", help="go on with what is written, until the run ends")
    for name, command, text in (("cancel", cancel, "end a run"), ("requeue", requeue, "start a run again")):
        add(commands, name, command, text, "run").add_argument(
            "task", nargs="?", type=int, help="one task of an array; without it, all of the run"
        )
    one = add(commands, "watch", watch, "loss and every GPU of every node")
    one.add_argument("run", nargs="+", help="run folder, name or job id, W&B log or folder, or entity/project/run")
    one.add_argument("--alert", default="", metavar="COMMAND", help="run for each alert, which is its last argument")
    one.add_argument("--once", action="store_true", help="print the state now and stop")
    one.add_argument("--html", metavar="FILE", help="write a page that needs nothing else")


def check(options: argparse.Namespace) -> int:
    """`kit check`: exit 1 where the profile and the machines disagree."""
    from kit.check.survey import fill, start_profile, survey
    from kit.config import schema
    from kit.files import write

    base = schema.find(options.cluster or "local", "clusters") if options.cluster or not options.write else None
    if options.write:
        text, cluster = start_profile(Path(options.write), base)
    else:
        cluster = Cluster.load(options.cluster or "local")
    if options.probe:
        from kit.check.probe import measure

        print(measure(cluster, Path(options.probe), say))
        return 0
    found = survey(cluster, options.nodes, say)
    show(options, {"findings": found.rows()}, found.lines())
    if options.write:
        write(Path(options.write), fill(text, found.facts()))
        say(f"wrote {options.write}")
    return int(any(row["problem"] for row in found.rows()))


def lint(options: argparse.Namespace) -> int:
    """`kit lint`: exit 1 when there is an error."""
    from kit.lint.lint import fix_file, lint_file

    cluster = Cluster.load(options.cluster) if options.cluster else None
    if options.fix:
        for path in map(Path, options.scripts):
            fix_file(path)
    found = [f for script in options.scripts for f in lint_file(Path(script), cluster)]
    lines = [f"{f.file}:{f.line}: {f.severity} {f.rule}: {f.message} {f.fix}" for f in found]
    show(options, {"findings": [dataclasses.asdict(f) for f in found]}, lines)
    return int(any(f.severity == "error" for f in found))


def launch(options: argparse.Namespace) -> int:
    """`kit launch`: with --wait, the exit code is the job's."""
    from kit.slurm import launch as slurm
    from kit.slurm.run import Run

    recipe, cluster = recipe_of(options), Cluster.load(options.cluster)
    if options.dry_run:
        from kit.slurm.plan import plan

        planned = plan(recipe, cluster)
        show(options, planned.as_dict(), str(planned).splitlines())
        return 0
    after = Run.attach(options.after) if options.after else None
    run = slurm.launch(recipe, cluster, anyway=options.anyway, after=after, when=options.when)
    show(options, {"run": str(run.path), "job_id": run.job_id}, [f"{run.path}", f"job {run.job_id}"])
    if not options.wait:
        return 0
    say(
        f"waiting; `kit watch {run.path.name}` shows it, Ctrl-C {'ends' if 'local' in str(run.job_id) else 'leaves'} it"
    )
    end = slurm.wait(run)
    say(f"{end.state}{': ' + end.cause if end.cause else ''}")
    return 0 if end.state == "COMPLETED" else end.exit_code or 1


def runs(options: argparse.Namespace) -> int:
    """`kit runs`: newest first."""
    from kit.slurm.launch import state as state_of
    from kit.slurm.run import runs as all_runs

    found = [(run, state_of(run)) for run in all_runs()]
    rows = [{"run": str(r.path), "job_id": r.job_id, "state": s.state, "tasks": s.tasks} for r, s in found]
    lines = [f"{r.path.name:40} {r.job_id!s:16} {s.state:14} {_tasks(s.tasks)}".rstrip() for r, s in found]
    show(options, {"runs": rows}, lines)
    return 0


def _tasks(states: dict[int, str]) -> str:
    """The tasks of an array by state: "0-2 4 COMPLETED, 3 FAILED"."""
    words = []
    for name in dict.fromkeys(states.values()):
        tasks = enumerate(sorted(task for task, state in states.items() if state == name))
        spans = [[task for _, task in span] for _, span in itertools.groupby(tasks, lambda pair: pair[1] - pair[0])]
        words.append(" ".join(f"{s[0]}-{s[-1]}" if len(s) > 1 else f"{s[0]}" for s in spans) + f" {name}")
    return ", ".join(words)


def state(options: argparse.Namespace) -> int:
    """`kit state`."""
    from kit.slurm import launch as slurm
    from kit.slurm.run import Run

    run = Run.attach(options.run)
    found, pending = slurm.state(run), slurm.why_pending(run)
    show(options, found.as_dict() | {"pending": pending}, found.lines() + ([pending] if pending else []))
    return 0


def tail(options: argparse.Namespace) -> int:
    """`kit tail`: Ctrl-C ends it and leaves the run alone."""
    from kit.slurm import launch as slurm
    from kit.slurm.run import Run

    run = Run.attach(options.run)
    if options.follow:
        for line in slurm.follow(run, options.rank, options.n):
            print(line, flush=True)
    else:
        print(run.tail(options.rank, options.n))
    return 0


def cancel(options: argparse.Namespace) -> int:
    """`kit cancel`."""
    from kit.slurm import launch as slurm
    from kit.slurm.run import Run

    slurm.cancel(Run.attach(options.run), options.task)
    return 0


def requeue(options: argparse.Namespace) -> int:
    """`kit requeue`: from its last checkpoint."""
    from kit.slurm import launch as slurm
    from kit.slurm.run import Run

    run = Run.attach(options.run)
    slurm.requeue(run, options.task)
    say(f"{run.path.name} starts again as job {run.job_id}")
    return 0


def watch(options: argparse.Namespace) -> int:
    """`kit watch`: the board until the run ends, or once; where no terminal is, only its status lines."""
    from kit.files import write
    from kit.watch.board import watch as board_of

    board = board_of(*options.run, on_alert=shlex.split(options.alert))
    if board.refused:
        raise InputError(board.refused)
    terminal = sys.stderr.isatty()
    while not options.once and not board.ended:
        say(f"\x1b[H\x1b[2J{board.text()}" if terminal else board.status())
        board.wait(2 if terminal else 30)
    print(board.text())
    if options.html:
        write(Path(options.html), board.html())
    return 0
