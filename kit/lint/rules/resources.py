"""KS3: what the job asks for. Time, nodes, GPUs and CPUs, and launches that do not match them."""

import re
from collections.abc import Iterator

from kit.lint.options import number
from kit.lint.rule import Hit, rule
from kit.lint.script import Script
from kit.lint.steps import Step

REMOTE = {"ssh", "mpirun", "mpiexec", "pdsh", "clush"}


@rule("KS301")
def time_limit(script: Script) -> Iterator[Hit]:
    if not script.request.has("time"):
        yield Hit(1, "There is no --time: the partition's default applies, and backfill cannot start the job early")
    elif script.request.hours > 24 and not script.resumes:
        limit = script.request.value("time")
        text = f"{limit} is more than a day: the job waits long in the queue, and nothing in the script resumes"
        yield Hit(script.request.line_of("time"), text)


@rule("KS302")
def more_than_allocated(script: Script) -> Iterator[Hit]:
    for step in script.launches:
        yield from _more_ranks_than_gpus(script, step)
        yield from _wrong_number_of_nodes(script, step)


def _nodes_of(script: Script, step: Step) -> int | None:
    """The nodes on which srun runs the step, otherwise those of the job; None: unknown."""
    return number((step.srun or {}).get("nodes", "")) or script.nodes


def _more_ranks_than_gpus(script: Script, step: Step) -> Iterator[Hit]:
    ranks = number(step.option("nproc_per_node", "num_processes"))
    gpus = script.gpus_per_node or 0
    if not step.option("nproc_per_node"):  # num_processes counts the ranks of all nodes
        gpus *= _nodes_of(script, step) or 0
    on_cpu = {"cpu", "use_cpu"} & step.options.keys()
    if ranks and gpus and ranks > gpus and not on_cpu:
        yield Hit(step.line, f"{ranks} ranks, but has {gpus} GPUs")


def _wrong_number_of_nodes(script: Script, step: Step) -> Iterator[Hit]:
    nodes = _nodes_of(script, step)
    wanted = number(step.option("nnodes", "num_machines"))
    launchers = nodes
    if nodes and step.srun is not None:
        launchers = nodes * (script.tasks_per_node(step) or wanted or 0)
    if step.starts_share_of_nodes:  # another srun starts the launchers of the other nodes
        nodes = launchers = script.nodes
        if wanted and nodes and wanted < nodes:
            return
    if not wanted or not launchers or not nodes:
        return
    if wanted > launchers or (step.srun is not None and wanted < nodes):
        yield Hit(step.line, f"{wanted} nodes, but has {nodes}")


@rule("KS303")
def several_launchers_on_a_node(script: Script) -> Iterator[Hit]:
    for step in script.launches:
        copies = script.tasks_per_node(step) or 1
        default = "" if step.program == "accelerate" else "1"  # accelerate starts one rank for each GPU
        ranks = step.option("nproc_per_node", "num_processes") or default
        if step.srun is not None and copies > 1 and ranks != "1":
            yield Hit(step.line, str(copies))


@rule("KS304")
def launcher_without_srun(script: Script) -> Iterator[Hit]:
    if (script.nodes or 1) <= 1 or _srun_runs_this_script(script):
        return
    for step in script.launches:
        one_node = step.option("nnodes", "num_machines") == "1" or "standalone" in step.options
        elsewhere = step.wrappers & REMOTE or "function" in step.command.inside
        if step.srun is None and not one_node and not elsewhere:
            yield Hit(step.line, step.program)


def _srun_runs_this_script(script: Script) -> bool:
    return any(step.srun is not None and re.search(r"\$0|BASH_SOURCE", step.text) for step in script.steps)


@rule("KS305")
def tasks_without_nodes(script: Script) -> Iterator[Hit]:
    request = script.request
    several = (number(request.value("ntasks")) or 1) > 1
    placed = request.has("nodes", "nodelist", "ntasks-per-node")
    if several and not placed and (request.has_gpus or script.launches):
        yield Hit(request.line_of("ntasks"), request.value("ntasks"))


@rule("KS308")
def visible_devices(script: Script) -> Iterator[Hit]:
    settings = list(script.settings("CUDA_VISIBLE_DEVICES"))
    the_same = len({setting.value for setting in settings}) == 1
    if the_same and not script.request.has("exclusive") and re.fullmatch(r"[\d,]+", settings[-1].value):
        yield Hit(settings[-1].line, f"{settings[-1].name}={settings[-1].value}")


@rule("KS309")
def no_cpus(script: Script) -> Iterator[Hit]:
    request = script.request
    if request.has_gpus and not request.has("cpus-per-task", "cpus-per-gpu", "exclusive", "mincpus"):
        yield Hit(min((option.line for option in request.options if "gpu" in option.name + option.value), default=1))
