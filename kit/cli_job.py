"""`kit check`, `lint`, `launch`, `runs`, `state`, `cancel`, `watch`: the cluster and the jobs on it."""

import argparse
import dataclasses
from pathlib import Path

from kit.cluster import Cluster
from kit.command import Commands, add, recipe_of, say, show


def register(commands: Commands) -> None:
    """These commands' parsers."""
    one = add(commands, "check", check, "what this cluster is, and where its profile is wrong", "cluster", "json")
    one.add_argument("--probe", metavar="PROFILE", help="measure GPUs and links in a job of minutes; write the profile")
    one = add(commands, "lint", lint, "what is wrong with sbatch scripts", "json")
    one.add_argument("scripts", nargs="+", metavar="SCRIPT")
    one.add_argument("--cluster", help="cluster profile, for what only the cluster knows")
    one.add_argument("--fix", action="store_true", help="write the safe fixes into the scripts")
    one = add(commands, "launch", launch, "freeze, submit, return at once", "recipe", "cluster", "json")
    one.add_argument("--wait", action="store_true", help="stay until it ends; its exit code is this command's")
    one.add_argument("--anyway", action="store_true", help="also where the forecast says that it does not fit")
    add(commands, "runs", runs, "every run that can be found", "json")
    add(commands, "state", state, "how a run is, or how it ended and why", "run", "json")
    add(commands, "cancel", cancel, "end a run", "run")
    one = add(commands, "watch", watch, "loss and every GPU of every node", "run")
    one.add_argument("--once", action="store_true", help="print the state now and stop")
    one.add_argument("--html", metavar="FILE", help="write a page that needs nothing else")


def check(options: argparse.Namespace) -> int:
    """`kit check`: exit 1 where the profile and the machine disagree."""
    from kit.cluster import detect

    cluster = Cluster.load(options.cluster)
    if options.probe:
        from kit.probe import measure

        print(measure(cluster, Path(options.probe), say))
        return 0
    found = detect(cluster)
    lines = [
        f"{f.name:20} {f.value}  [{f.how}]" + (f"\n{'':20} PROBLEM: {f.problem}" if f.problem else "") for f in found
    ]
    show(options, {"findings": [dataclasses.asdict(f) for f in found]}, lines)
    return int(any(f.problem for f in found))


def lint(options: argparse.Namespace) -> int:
    """`kit lint`: exit 1 when there is an error."""
    from kit.lint import fix_file, lint_file

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
    from kit import slurm

    run = slurm.launch(recipe_of(options), Cluster.load(options.cluster), anyway=options.anyway)
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
    from kit.run import runs as all_runs
    from kit.slurm import state as state_of

    found = [(run, state_of(run)) for run in all_runs()]
    rows = [{"run": str(r.path), "job_id": r.job_id, "state": s.state} for r, s in found]
    show(options, {"runs": rows}, [f"{r.path.name:40} {r.job_id!s:16} {s.state}" for r, s in found])
    return 0


def state(options: argparse.Namespace) -> int:
    """`kit state`."""
    from kit.run import Run
    from kit.slurm import state as state_of

    found = state_of(Run.attach(options.run))
    show(options, found.as_dict(), found.lines())
    return 0


def cancel(options: argparse.Namespace) -> int:
    """`kit cancel`."""
    from kit import slurm
    from kit.run import Run

    slurm.cancel(Run.attach(options.run))
    return 0


def watch(options: argparse.Namespace) -> int:
    """`kit watch`: the status line until the run ends, or once."""
    from kit.board import watch as board_of
    from kit.files import write

    board = board_of(options.run)
    while not options.once and not board.ended:
        board.wait(5)
        say(board.status())
    print(board.status())
    if options.html:
        write(Path(options.html), board.html())
    return 0
