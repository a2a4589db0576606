"""Script: a batch script as sbatch reads it (directives) and as bash reads it (commands and steps)."""

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from kit.lint.options import Directive, Option, directives, number, parse_options, sbatch_with_plugins
from kit.lint.shell import Code, Command, Setting, Word, after
from kit.lint.site import Site
from kit.lint.steps import LAUNCHERS, Scope, Step, read_steps

RESUME = re.compile(
    r"resum|(?<!max[-_])restart|requeue|restor|last_?ckpt|ckpt_path|load[-_]?(ckpt|check)|--load\b|from_check", re.I
)
HETEROGENEOUS = (["hetjob"], ["packjob"])  # directives that separate the components of a heterogeneous job


@dataclass(frozen=True)
class Request:
    """What the directives ask of sbatch.

    options: all, in order, with those that sbatch refuses. operands: words that are neither an option nor its value.
    """

    directives: list[Directive]
    options: list[Option]
    operands: list[Option]

    @classmethod
    def parse(cls, text: str, site: Site) -> "Request":
        """The directives of a script."""
        table = sbatch_with_plugins(site.options)
        lines, options, operands = list(directives(text)), [], []
        for line, words in lines:
            parsed = parse_options(words, line, table)
            options += parsed.options
            if parsed.rest and parsed.rest not in HETEROGENEOUS:
                operands.append(Option("", parsed.rest[0], line))
        return cls(lines, options, operands)

    @cached_property
    def heterogeneous(self) -> bool:
        """Whether the job has several components, each with its own options."""
        return any(words in HETEROGENEOUS for _, words in self.directives)

    @cached_property
    def accepted(self) -> dict[str, Option]:
        """The options that sbatch accepts, by long name; of several the last, as sbatch takes it."""
        return {option.name: option for option in self.options if not option.problem}

    def has(self, *names: str) -> bool:
        """Whether a directive gives any of these options."""
        return any(name in self.accepted for name in names)

    def line_of(self, *names: str) -> int:
        """The line of the first of these options that is given, else 1."""
        return next((self.accepted[name].line for name in names if name in self.accepted), 1)

    def value(self, name: str) -> str:
        """The value of an option; "" where it is not given."""
        return self.accepted[name].value if name in self.accepted else ""

    @property
    def has_gpus(self) -> bool:
        """Whether the job asks for GPUs."""
        return "gpu" in self.value("gres") or any(name.startswith("gpus") for name in self.accepted)

    @property
    def hours(self) -> float:
        """The time limit in hours; 0 where none is given, or not in digits."""
        match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", self.value("time"))
        if not match:
            return 0
        days, first, second, third = (int(group or 0) for group in match.groups())
        clock = first + second / 60 + third / 3600
        in_hours = match[1] or match[4]  # D-HH, D-HH:MM, D-HH:MM:SS, HH:MM:SS; otherwise MM or MM:SS
        return 24 * days + (clock if in_hours else clock / 60)


class Script:
    """A batch script. Everything that rules know of it.

    raw: the text as given; text: with Unix line ends; rows: its lines. request: of its directives. code: its commands
    and comments. scope: the variables that it sets. steps: its commands with known variables filled in.
    """

    def __init__(self, text: str, file: str = "script", site: Site | None = None) -> None:
        self.raw = text
        self.text = text.replace("\r\n", "\n")
        self.rows = self.text.split("\n")
        self.file = file
        self.site = site or Site()
        self.request = Request.parse(self.text, self.site)
        self.code = Code(self.text if self._is_shell() else "")
        self.scope = Scope()
        self.steps = read_steps(self.code.commands, self.scope)

    def _is_shell(self) -> bool:
        return not self.rows[0].startswith("#!") or bool(re.search(r"sh\b", self.rows[0]))

    @cached_property
    def body_line(self) -> int:
        """The first line that is neither blank nor a comment; the last line where there is none."""
        return next((n for n, row in enumerate(self.rows, 1) if not re.match(r"\s*(#|$)", row)), len(self.rows))

    @cached_property
    def words(self) -> list[Word]:
        """The words of all commands."""
        return [word for command in self.code.commands for word in command.words]

    @cached_property
    def launches(self) -> list[Step]:
        """Steps that start one rank for each GPU."""
        return [step for step in self.steps if step.program in LAUNCHERS]

    @cached_property
    def trainings(self) -> list[Step]:
        """Steps whose failure should be the job's failure."""
        return [step for step in self.steps if step.trains]

    @property
    def main(self) -> Step | None:
        """The last training."""
        return self.trainings[-1] if self.trainings else None

    @cached_property
    def _modes(self) -> list[str]:
        """What sets options of the shell: `set` commands and the first line."""
        return [*(step.text for step in self.steps if step.program == "set"), self.rows[0].partition(" ")[2]]

    @cached_property
    def errexit(self) -> bool:
        """Whether the shell ends at the first command that fails (set -e)."""
        return any(re.search(r"(^| )-\w*e|errexit", mode) for mode in self._modes)

    @cached_property
    def pipefail(self) -> bool:
        """Whether the failure of any command in a pipeline is noticed."""
        return any("pipefail" in mode for mode in self._modes) or "PIPESTATUS" in self.text

    @cached_property
    def functions(self) -> set[str]:
        """Names of the functions that the script defines."""
        inside = {kind for command in self.code.commands for kind in command.inside}
        return {kind.removeprefix("function ") for kind in inside if kind.startswith("function ")}

    def commands_after(self, step: Step) -> list[Command]:
        """The script's commands that may run after a step: without those in other branches of the same if or case."""
        after = self.code.commands[step.index + 1 :]
        other = {"if": {"elif", "else"}, "case": {"case"}}
        branches = {branch for kind in other.keys() & step.command.inside for branch in other[kind]}
        return list(itertools.dropwhile(lambda command: bool(branches & command.inside), after))

    @cached_property
    def resumes(self) -> bool:
        """Whether anything in the script suggests that the training resumes after an interruption."""
        return self.request.has("signal") or any(RESUME.search(word.text) for word in self.words)

    @cached_property
    def nodes(self) -> int | None:
        """How many nodes the directives ask for, at least; None where they leave it open."""
        if self.request.heterogeneous:
            return None
        asked = self.request.value("nodes")
        if asked:
            return number(asked.partition("-")[0])
        named = self.request.value("nodelist")
        other = re.search(r"[,\[/]", named) or self.request.has("ntasks", "nodefile")
        return None if other or re.search(r"SLURM_(NNODES|JOB_NUM_NODES)", self.text) else 1

    @cached_property
    def gpus_per_node(self) -> int | None:
        """GPUs of each node; None where unknown, or where they are slices of a GPU (MIG)."""
        items = [item for item in self.request.value("gres").split(",") if item.startswith("gpu")]
        total = self.request.value("gpus") if self.nodes == 1 else ""
        items = items or (self.request.value("gpus-per-node") or total).split(",")
        if self.request.heterogeneous or items == [""] or re.search(r"\dg\.|mig", " ".join(items)):
            return None
        return sum(number(item.rpartition(":")[2]) or 1 for item in items)

    def tasks_per_node(self, step: Step) -> int | None:
        """How many copies of a step srun starts on a node; None where a variable decides."""
        srun = step.srun or {}
        for options in (srun, {name: option.value for name, option in self.request.accepted.items()}):
            if "ntasks" in options:
                nodes = number(srun["nodes"]) if "nodes" in srun else self.nodes
                return _spread(number(options["ntasks"]), nodes)
            if "ntasks-per-node" in options:
                return number(options["ntasks-per-node"])
        return 1

    def launcher_options(self, *names: str) -> Iterator[Setting]:
        """The settings that launchers are given with these options."""
        for step in self.steps:
            yield from (step.options[name] for name in names if name in step.options)

    def settings(self, variable: str, *names: str) -> Iterator[Setting]:
        """The settings of an environment variable, and of launcher options that mean the same."""
        yield from self.launcher_options(*names)
        yield from (assignment for assignment in self.scope.assignments if assignment.name == variable)

    @property
    def ports(self) -> list[Setting]:
        """Rendezvous ports as written; of several equal ones the first."""
        given = [*self.settings("MASTER_PORT", "master_port", "main_process_port")]
        given += self.launcher_options("rdzv_endpoint")
        ports = [
            replace(setting, parts=after(setting.parts, setting.value.rfind(":") + 1)) for setting in reversed(given)
        ]
        return list({port.value: port for port in ports}.values())


def _spread(tasks: int | None, nodes: int | None) -> int | None:
    """Tasks on the fullest node."""
    if tasks and nodes:
        return math.ceil(tasks / nodes)
    return 1 if tasks == 1 else None
