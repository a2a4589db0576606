"""KS4: ranks and rendezvous. Node ranks, addresses, ports, and how launchers and srun are given them."""

import difflib
import re
from collections.abc import Iterator
from typing import NamedTuple

from kit.lint.options import VARIABLES, number
from kit.lint.rule import Hit, rule
from kit.lint.script import Script
from kit.lint.shell import DOLLAR, LATER, NOW, variables
from kit.lint.steps import LAUNCHERS, Step

DYNAMIC_RENDEZVOUS = ("c10d", "etcd", "etcd-v2")  # these give each node its rank
# $(hostname) is another name on each node only where a later shell expands it.
THIS_HOST = rf"(localhost|127\.0\.0\.\d+)(:.*)?|{LATER}\(hostname\b.*|.*\|\|\s*echo ['\"]?(localhost|127\.).*"
NODE_LIST = DOLLAR + r"\{?SLURM_(JOB_)?NODELIST\}?(:.*)?"
HOSTNAME_ADDRESSES = re.compile(r"\bhostname (-I|-i|--(all-)?ip-address(es)?)\b")
# Of releases in which srun does not take over --cpus-per-task, and reads SRUN_CPUS_PER_TASK.
WITHOUT_CPUS_PER_TASK = ("22.05", "23.02")
CONDA_HOOK = re.compile(r"conda\.sh|shell\.\w+\W+hook|bashrc|profile\b|module load|^#!.* (-\w*l|--login)")


class NodeRank(NamedTuple):
    """A launcher's option for the node's rank, with a value from Slurm's variables."""

    line: int
    value: str
    step: Step


def _node_ranks(script: Script, dollar: str, dynamic: bool) -> Iterator[NodeRank]:
    """Node ranks that NOW or LATER expands, with a dynamic rendezvous or with another one."""
    if script.nodes == 1:
        return
    for step in script.launches:
        if dynamic != (step.option("rdzv_backend") in DYNAMIC_RENDEZVOUS):
            continue
        for rank in (step.options[name] for name in ("node_rank", "machine_rank") if name in step.options):
            names = variables(rank.value, dollar)
            if any(re.match("SLURM_(PROCID|NODEID|LOCALID)", name) for name in names):
                yield NodeRank(rank.line, rank.value, step)


@rule("KS401")
def rank_of_first_node(script: Script) -> Iterator[Hit]:
    """A node rank that the batch shell expands, once for all nodes."""
    yield from (Hit(rank.line, rank.value) for rank in _node_ranks(script, NOW, dynamic=False))


@rule("KS401b")
def rank_of_first_node_ignored(script: Script) -> Iterator[Hit]:
    """The same with a rendezvous that ignores it."""
    yield from (Hit(rank.line, rank.value) for rank in _node_ranks(script, NOW, dynamic=True))


@rule("KS402")
def task_rank_as_node_rank(script: Script) -> Iterator[Hit]:
    """SLURM_PROCID as a node's rank where a node has several tasks."""
    for rank in _node_ranks(script, LATER, dynamic=False):
        if "PROCID" in rank.value and (script.tasks_per_node(rank.step) or 1) > 1:
            yield Hit(rank.line, rank.value)


def _addresses(script: Script, pattern: str) -> Iterator[Hit]:
    for setting in script.settings("MASTER_ADDR", "rdzv_endpoint", "master_addr", "main_process_ip"):
        if re.fullmatch(pattern, setting.value, re.DOTALL):
            yield Hit(setting.line, setting.value)


@rule("KS403")
def node_list_as_address(script: Script) -> Iterator[Hit]:
    """Slurm's compressed list of nodes as an address."""
    if script.nodes != 1:
        yield from _addresses(script, NODE_LIST)


@rule("KS404")
def own_host_as_address(script: Script) -> Iterator[Hit]:
    """An address that is a different machine on each node."""
    if (script.nodes or 1) > 1:
        yield from _addresses(script, THIS_HOST)


@rule("KS405")
def address_from_hostname(script: Script) -> Iterator[Hit]:
    """An address from the hostname program."""
    for command in script.code.commands:
        if match := HOSTNAME_ADDRESSES.search(command.text):
            yield Hit(command.line, match[0])


@rule("KS406")
def fixed_port(script: Script) -> Iterator[Hit]:
    """The same port for each job."""
    if script.request.has("exclusive"):
        return
    for port in script.ports:
        if port.value.isdecimal() and int(port.value) > 0:  # with port 0 the system chooses one
            yield Hit(port.line, port.value)


@rule("KS407")
def bad_random_port(script: Script) -> Iterator[Hit]:
    """A random port that may be below 1024, or is a different one on each node."""
    for port in script.ports:
        lowest = re.search(r"shuf\s+-i\s*(\d+)-", port.value)
        privileged = lowest is not None and int(lowest[1]) < 1024
        plain_random = re.fullmatch(DOLLAR + r"(\{?RANDOM\}?|\(\(\s*\$?RANDOM\s*\)\))", port.value)  # 0 to 32767
        differs = script.nodes != 1 and re.search(LATER + r"(\{?RANDOM|\(.*(RANDOM|shuf))", port.value)
        if privileged or plain_random or differs:
            yield Hit(port.line, port.value)


@rule("KS408")
def fixed_rendezvous_id(script: Script) -> Iterator[Hit]:
    """The same rendezvous id for each job."""
    for setting in script.launcher_options("rdzv_id"):
        if re.fullmatch(r"\w+", setting.value):
            yield Hit(setting.line, setting.value, found=setting.value)


@rule("KS409")
def assignment_as_program(script: Script) -> Iterator[Hit]:
    """srun NAME=value program."""
    for step in script.steps:
        match = re.match(r"\w+=", step.texts[0])
        if step.srun is not None and match:
            yield Hit(step.line, f"{match[0]}...", found=match[0])


@rule("KS410")
def srun_without_cpus(script: Script) -> Iterator[Hit]:
    """srun of a release that does not take over --cpus-per-task."""
    release_is_affected = script.site.release[:5] in WITHOUT_CPUS_PER_TASK
    one_cpu = script.request.value("cpus-per-task") in ("", "1")
    if not release_is_affected or one_cpu or "SRUN_CPUS_PER_TASK" in script.scope.variables:
        return
    for step in script.trainings:
        if step.srun is not None and "cpus-per-task" not in step.srun:
            yield Hit(step.line)


@rule("KS411")
def misspelt_variable(script: Script) -> Iterator[Hit]:
    """A variable SLURM_... that Slurm does not set, and that is similar to one that it sets."""
    known = VARIABLES | {assignment.name for assignment in script.scope.assignments}
    for word in script.words:
        names = {name for name in variables(word.text) if re.match(r"SLURM_\w", name)}
        for name in names - known:
            similar = difflib.get_close_matches(name, sorted(known), 1, 0.9)
            if similar and "HET_GROUP" not in name:
                yield Hit(word.line, f"Slurm sets {similar[0]}, not {name}", found=name, replacement=similar[0])


@rule("KS412")
def rank_without_effect(script: Script) -> Iterator[Hit]:
    """A node's own rank with a rendezvous that ignores it."""
    yield from (Hit(rank.line, "The node rank") for rank in _node_ranks(script, LATER, dynamic=True))


@rule("KS413")
def standalone_on_several_nodes(script: Script) -> Iterator[Hit]:
    """--standalone in a launch on several nodes."""
    for step in script.launches:
        launched_on = 1
        if step.srun is not None:
            launched_on = number(step.srun.get("nodes", "")) or script.nodes or 1
        nodes = max(number(step.option("nnodes")) or 1, launched_on)
        if "standalone" in step.options and nodes > 1:
            yield Hit(step.line, str(nodes))


@rule("KS413b")
def standalone_with_address(script: Script) -> Iterator[Hit]:
    """--standalone with an address or a port, which it ignores."""
    for step in script.launches:
        for name in ("master_port", "rdzv_endpoint"):
            if "standalone" in step.options and name in step.options:
                yield Hit(step.line, f"--{name}")


@rule("KS414")
def conda_without_hook(script: Script) -> Iterator[Hit]:
    """conda activate in a shell that has not read conda's hook."""
    if CONDA_HOOK.search(script.text):
        return
    for step in script.steps:
        if match := re.match(r"(conda|source|\.) activate\b(?!\S)", step.text):
            yield Hit(step.line, match[0])


@rule("KS415")
def deprecated_in_pytorch(script: Script) -> Iterator[Hit]:
    """A launcher or a variable that PyTorch has deprecated."""
    for step in script.launches:
        if step.program == "torch.distributed.launch":
            yield Hit(step.line, step.program)
    for setting in script.assignments("NCCL_ASYNC_ERROR_HANDLING"):
        yield Hit(setting.line, f"{setting.name}={setting.value}")


@rule("KS416")
def srun_waits_for_failed_task(script: Script) -> Iterator[Hit]:
    """srun of several tasks without --kill-on-bad-exit, and without a launcher that ends them."""
    for step in script.trainings:
        if step.srun is None or step.program in LAUNCHERS or "kill-on-bad-exit" in step.srun:
            continue
        counts = (step.srun.get("ntasks"), step.srun.get("nodes", str(script.nodes)))
        if script.tasks_per_node(step) != 1 or "1" not in counts:
            yield Hit(step.line)
