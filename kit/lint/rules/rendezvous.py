"""KS4: ranks and rendezvous. Node ranks, addresses, ports, and how launchers and srun are given them."""

import difflib
import re
from collections.abc import Iterator

from kit.lint.options import VARIABLES, number
from kit.lint.rule import Hit, rule
from kit.lint.script import Script
from kit.lint.shell import Setting, after, variables
from kit.lint.steps import LAUNCHERS, Step, first_of_each_command

DYNAMIC_RENDEZVOUS = ("c10d", "etcd", "etcd-v2")  # these give each node its rank
THIS_HOST = re.compile(r"(localhost|127\.0\.0\.\d+)(:.*)?|.*\|\|\s*echo ['\"]?(localhost|127\.).*", re.DOTALL)
NODE_LIST = re.compile(r"\$\{?SLURM_(JOB_)?NODELIST\}?(:.*)?", re.DOTALL)
# Of releases in which srun does not take over --cpus-per-task, and reads SRUN_CPUS_PER_TASK.
WITHOUT_CPUS_PER_TASK = ("22.05", "23.02")


def _node_ranks(script: Script, now: bool) -> Iterator[tuple[Setting, Step]]:
    """Node ranks from Slurm's variables that the batch shell or a later one expands, each with its launcher."""
    for step in script.launches if script.nodes != 1 else ():
        if script.nodes is None and {"if", "elif", "else"} & step.command.inside:
            continue  # it may be the branch for one node
        for rank in (step.options[name] for name in ("node_rank", "machine_rank") if name in step.options):
            if any(re.match("SLURM_(PROCID|NODEID|LOCALID)", name) for name in rank.references(now)):
                yield rank, step


def _gives_ranks(step: Step) -> bool:
    return step.option("rdzv_backend") in DYNAMIC_RENDEZVOUS


@rule("KS401")
def rank_of_first_node(script: Script) -> Iterator[Hit]:
    for rank, step in _node_ranks(script, now=True):
        yield Hit(rank.line, rank.value, milder=_gives_ranks(step))
    yield from _literal_ranks(script)
    yield from _exported_ranks(script)


def _literal_ranks(script: Script) -> Iterator[Hit]:
    """Node ranks in digits of a launcher that one srun starts on several nodes."""
    for step in script.launches:
        nodes = number((step.srun or {}).get("nodes", "")) or script.nodes or 1
        if step.srun is None or step.starts_share_of_nodes or nodes == 1 or _gives_ranks(step):
            continue
        ranks = (step.options[name] for name in ("node_rank", "machine_rank") if name in step.options)
        if step.option("nnodes", "num_machines") != "1" and step.srun.get("ntasks") != "1":
            yield from (Hit(rank.line, f"{rank.name}={rank.value}") for rank in ranks if rank.value.isdecimal())


def _exported_ranks(script: Script) -> Iterator[Hit]:
    """Ranks that the batch shell takes from Slurm's variables and passes to the tasks of a srun in the environment."""
    steps = [step for step in script.trainings if step.srun is not None and step.program.startswith("python")]
    if not any((script.nodes or 1) > 1 or (script.tasks_per_node(step) or 1) > 1 for step in steps):
        return
    for command in script.code.commands:
        if all(re.match(r"\w+=", word.text) for word in command.words):  # not exported
            continue
        for word in command.words:
            match = re.match(r"(?:--export=(?:.*,)?)?(RANK|LOCAL_RANK)=", word.text)
            setting = Setting(match[1], after(word.parts, match.end()), word.line) if match else None
            names = setting.references(now=True) if setting else []
            if setting and any(re.fullmatch("SLURM_(PROCID|NODEID|LOCALID)", name) for name in names):
                yield Hit(setting.line, f"{setting.name}={setting.value}")


@rule("KS402")
def task_rank_as_node_rank(script: Script) -> Iterator[Hit]:
    for rank, step in _node_ranks(script, now=False):
        several_tasks = (script.tasks_per_node(step) or 1) > 1
        if "PROCID" in rank.value and several_tasks and not _gives_ranks(step):
            yield Hit(rank.line, rank.value)


@rule("KS412")
def rank_without_effect(script: Script) -> Iterator[Hit]:
    for rank, step in _node_ranks(script, now=False):
        if _gives_ranks(step):
            yield Hit(rank.line, "The node rank")


def _addresses(script: Script) -> Iterator[Setting]:
    return script.settings("MASTER_ADDR", "rdzv_endpoint", "master_addr", "main_process_ip")


@rule("KS403")
def node_list_as_address(script: Script) -> Iterator[Hit]:
    for address in _addresses(script):
        if script.nodes != 1 and NODE_LIST.fullmatch(address.value):
            yield Hit(address.line, address.value)


@rule("KS404")
def own_host_as_address(script: Script) -> Iterator[Hit]:
    for address in _addresses(script):
        own_host = THIS_HOST.fullmatch(address.value) or address.later_matches(r"^\$\(hostname\b")
        if (script.nodes or 1) > 1 and own_host:
            yield Hit(address.line, address.value)


@rule("KS417")
def fixed_host_as_address(script: Script) -> Iterator[Hit]:
    found: set[str] = set()  # a variable's host is one cause, wherever the variable is used
    for address in _addresses(script):
        host = address.value.rpartition(":")[0] or address.value
        chosen = script.request.has("nodelist") or THIS_HOST.fullmatch(address.value)
        is_name = re.fullmatch(r"\w[\w-]*(\.[\w-]+)*", host)
        if script.nodes != 1 and not chosen and is_name and host not in found:
            found.add(host)
            yield Hit(address.line, host)


@rule("KS406")
def fixed_port(script: Script) -> Iterator[Hit]:
    if script.request.has("exclusive"):
        return
    for port in script.ports:
        if port.value.isdecimal() and int(port.value) > 0:  # with port 0 the system chooses one
            yield Hit(port.line, port.value)


@rule("KS407")
def bad_random_port(script: Script) -> Iterator[Hit]:
    for port in script.ports:
        lowest = re.search(r"shuf\s+-i\s*(\d+)-", port.value)
        privileged = lowest is not None and int(lowest[1]) < 1024
        plain_random = re.fullmatch(r"\$(\{?RANDOM\}?|\(\(\s*\$?RANDOM\s*\)\))", port.value)  # 0 to 32767
        differs = script.nodes != 1 and port.later_matches(r"\$(\{?RANDOM|\(.*(RANDOM|shuf))")
        if privileged or plain_random or differs:
            yield Hit(port.line, port.value)


@rule("KS410")
def srun_without_cpus(script: Script) -> Iterator[Hit]:
    release_is_affected = script.site.release[:5] in WITHOUT_CPUS_PER_TASK
    one_cpu = script.request.value("cpus-per-task") in ("", "1")
    if not release_is_affected or one_cpu or "SRUN_CPUS_PER_TASK" in script.scope.variables:
        return
    for step in script.trainings:
        if step.srun is not None and "cpus-per-task" not in step.srun:
            yield Hit(step.line)


@rule("KS411")
def misspelt_variable(script: Script) -> Iterator[Hit]:
    known = VARIABLES | {assignment.name for assignment in script.scope.assignments}
    for word in script.words:
        names = {name for name in variables(word.text) if re.match(r"SLURM_\w", name)}
        for name in names - known:
            similar = difflib.get_close_matches(name, sorted(known), 1, 0.9)
            if similar and "HET_GROUP" not in name:
                yield Hit(word.line, f"Slurm sets {similar[0]}, not {name}", found=name, replacement=similar[0])


@rule("KS413")
def standalone(script: Script) -> Iterator[Hit]:
    for step in script.launches:
        if "standalone" not in step.options:
            continue
        launched_on = 1
        if step.srun is not None:
            launched_on = number(step.srun.get("nodes", "")) or script.nodes or 1
        nodes = max(number(step.option("nnodes")) or 1, launched_on)
        if nodes > 1:
            yield Hit(step.line, str(nodes))
        for name in ("master_port", "rdzv_endpoint"):
            if name in step.options:
                yield Hit(step.line, f"--{name}", milder=True)


@rule("KS416")
def srun_waits_for_failed_task(script: Script) -> Iterator[Hit]:
    for step in first_of_each_command(script.trainings):
        if step.srun is None or step.program in LAUNCHERS or "kill-on-bad-exit" in step.srun:
            continue
        counts = (step.srun.get("ntasks"), step.srun.get("nodes", str(script.nodes)))
        if script.tasks_per_node(step) != 1 or "1" not in counts:
            yield Hit(step.line)
