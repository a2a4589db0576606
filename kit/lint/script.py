"""A batch script as its two readers see it: sbatch (directives) and bash (commands, quotes, heredocs, comments)."""

import itertools
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from kit.lint.shell import FIELD, KNOWN, LATE, SBATCH, Code, Command, Setting, Word, base, directives, number, options
from kit.lint.site import Site

# Programs that start another one, programs whose failure matters little, and what a launch can begin with.
WRAPPERS = re.compile(
    r"env|time|nohup|exec|command|stdbuf|numactl|timeout|nice|singularity|apptainer|uv|poetry|pixi|conda|mamba|nsys"
    r"|taskset|setsid|ssh|mpirun|mpiexec|pdsh|clush"
)
PROBES = re.compile(
    r"hostname|nvidia-smi|echo|date|mkdir|cp|rm|ls|sleep|ray|scontrol|bash|sh|cat|printenv|true|pip|ip|touch|kill|module"
    r"|cd|export|source|\.|set|unset|ulimit|umask|trap|read|wait|exit|test|\[\[?|for|case"
)
PROGRAM = re.compile(r"torchrun|accelerate|deepspeed|python[\d.]*|bash|sh|srun|pip3?")
MODULES = {"torch.distributed.run": "torchrun", "accelerate.commands.launch": "accelerate"}
SRUN = f"{SBATCH} {KNOWN['srun']} {KNOWN['site']}"
ELASTIC = ("torchrun", "torch.distributed.launch", "accelerate")
RESUME = re.compile(
    r"resum|(?<!max[-_])restart|requeue|restor|last_?ckpt|ckpt_path|load[-_]?(ckpt|check)|--load\b|from_check", re.I
)


@dataclass(frozen=True)
class Step:
    """A command with known variables filled in and its wrappers taken off. srun: the options it runs under, or None."""

    words: list[Word]
    command: Command
    srun: dict[str, str] | None
    wrappers: frozenset[str]
    index: int

    @property
    def line(self) -> int:
        """Where the command begins."""
        return self.command.words[0].line

    @cached_property
    def texts(self) -> list[str]:
        """The words as plain text."""
        return [w.text for w in self.words]

    @cached_property
    def program(self) -> str:
        """torchrun and accelerate by whichever spelling, else the name of what runs."""
        name, module = base(self.texts[0]), re.match(r"\S*python[\d.]*( -\w+)*? -m (\S+)", " ".join(self.texts))
        if module:
            return MODULES.get(module[2], module[2])
        return "" if name == "accelerate" and self.texts[1:2] != ["launch"] else name

    @cached_property
    def options(self) -> dict[str, Setting]:
        """The launcher's own options, up to the training script, with _ for - in their names."""
        found: dict[str, Setting] = {}
        if self.program in (*ELASTIC, "deepspeed"):
            start = self.texts.index("-m") + 2 if base(self.texts[0]).startswith("python") else 0
            for word, after in itertools.pairwise([*self.words[start:], Word("-", 0)]):
                if word.text.endswith(".py") or word.text in ("-m", "--module"):
                    break
                if word.text.startswith("--"):
                    name, equals, value = word.text[2:].partition("=")
                    value = value if equals or after.text.startswith("-") else after.text
                    found[name.replace("-", "_")] = Setting(name, value, word.line)
        return found

    def get(self, *names: str) -> str:
        """The value of the first of these options that is given, else an empty text."""
        return next((self.options[n].value for n in names if n in self.options), "")

    @cached_property
    def trains(self) -> bool:
        """Whether its failure should be the job's failure."""
        program, srun = self.program, self.srun is not None
        file = any(re.fullmatch(r"\S+\.(py|sh)" if srun else r"\S+\.py", t) for t in self.texts)
        runs = (srun and not PROBES.fullmatch(program)) or (file and re.match(r"python|(ba)?sh$", program))
        checked = {"condition", "function"} & self.command.inside
        return not checked and bool(runs or program in (*ELASTIC, "deepspeed"))


class Script:
    """A script as rules see it: what it asks of sbatch, and its steps with known variables filled in."""

    def __init__(self, text: str, file: str = "script", site: Site | None = None) -> None:
        self.raw, self.text, self.file = text, text.replace("\r\n", "\n"), file
        self.site = site or Site()
        self.own = {f"{name}={value}" for name, value in self.site.environment.items()}
        self.rows = self.text.split("\n")
        self.directives = list(directives(self.text))
        self.asks: list[Setting] = []
        self.operands: list[tuple[int, str]] = []
        table = f"{SBATCH} {KNOWN['site']} {'? '.join([*sorted(self.site.options), ''])}"
        for line, words in self.directives:
            found, rest = options(words, line, table)
            self.asks += found
            self.operands += [(line, word) for word in rest[:1] if rest not in (["hetjob"], ["packjob"])]
        self.het = any(w in (["hetjob"], ["packjob"]) for _, w in self.directives)
        self.asked = {o.name: o for o in self.asks if not o.problem}
        self.body = next((i for i, row in enumerate(self.rows, 1) if not re.match(r"\s*(#|$)", row)), len(self.rows))
        shell = not self.rows[0].startswith("#!") or re.search(r"sh\b", self.rows[0])
        parsed = Code(self.text if shell else "")
        self.comments, self.commands = parsed.comments, parsed.commands
        self.words = [w for c in self.commands for w in c.words]
        self.variables: dict[str, str] = {}
        self.assigned: list[Setting] = []
        self.steps = [s for i, c in enumerate(self.commands) for s in self._steps(list(c.words), c, i)]
        self.launches = [s for s in self.steps if s.program in ELASTIC]
        self.trainings = [s for s in self.steps if s.trains]
        self.main = self.trainings[-1] if self.trainings else None
        modes = [" ".join(s.texts) for s in self.steps if s.program == "set"] + [self.rows[0].partition(" ")[2]]
        self.errexit = any(re.search(r"(^| )-\w*e|errexit", m) for m in modes)
        self.pipefail = any("pipefail" in m for m in modes) or "PIPESTATUS" in self.text
        self.resumes = any(RESUME.search(w.text) for w in self.words) or "signal" in self.asked

    def has(self, *names: str) -> bool:
        """Whether a directive gives any of these options."""
        return any(name in self.asked for name in names)

    def at(self, *names: str) -> int:
        """The line of the first of these options that is given, else 1."""
        return next((self.asked[n].line for n in names if n in self.asked), 1)

    def value(self, name: str) -> str:
        """What the last directive gives for this option, else an empty text."""
        return self.asked[name].value if name in self.asked else ""

    @cached_property
    def nodes(self) -> int | None:
        """How many nodes the directives ask for, at least; None where they leave it open."""
        if self.het or not self.value("nodes"):
            asks = self.has("nodelist", "ntasks", "nodefile") or re.search(r"SLURM_(NNODES|JOB_NUM_NODES)", self.text)
            return None if self.het or asks else 1
        return number(self.value("nodes").partition("-")[0])

    @cached_property
    def gpus(self) -> int | None:
        """GPUs per node; None where unknown, or where they are slices of one (MIG)."""
        per_node = self.value("gpus-per-node") or (self.value("gpus") if self.nodes == 1 else "")
        items = [i for i in self.value("gres").split(",") if i.startswith("gpu")] or per_node.split(",")
        if self.het or items == [""] or re.search(r"\dg\.|mig", " ".join(items)):
            return None
        return sum(number(i.rpartition(":")[2]) or 1 for i in items)

    @property
    def has_gpus(self) -> bool:
        """Whether it asks for GPUs at all."""
        return "gpu" in self.value("gres") or any(n.startswith("gpus") for n in self.asked)

    @property
    def hours(self) -> float:
        """The time limit; 0 where none is given or it is not plain."""
        match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", self.value("time"))
        if not match:
            return 0
        days, *clock = (int(g) if g else 0 for g in match.groups())
        first = 1 if match[1] or match[4] else 1 / 60  # without days or seconds it is MM or MM:SS
        return 24 * days + first * (clock[0] + clock[1] / 60 + clock[2] / 3600)

    def tasks_per_node(self, step: Step) -> int | None:
        """How many copies of a step srun starts on a node; None where a variable decides."""
        srun = step.srun or {}
        for given in (srun, {name: o.value for name, o in self.asked.items()}):
            if "ntasks" in given:
                tasks, nodes = number(given["ntasks"]), number(srun["nodes"]) if "nodes" in srun else self.nodes
                return math.ceil(tasks / nodes) if tasks and nodes else 1 if tasks == 1 else None
            if "ntasks-per-node" in given:
                return number(given["ntasks-per-node"])
        return 1

    def given(self, variable: str, *names: str) -> Iterator[Setting]:
        """Values of a launcher's options and of an environment variable that stand for the same thing."""
        for step in self.steps:
            yield from (step.options[n] for n in names if n in step.options)
        yield from (a for a in self.assigned if a.name == variable)

    @property
    def ports(self) -> dict[str, int]:
        """Rendezvous ports as written, and the line of each."""
        values = [*self.given("MASTER_PORT", "master_port", "main_process_port"), *self.given("", "rdzv_endpoint")]
        return {v.value.rpartition(":")[2]: v.line for v in reversed(values)}

    def set_to(self, name: str, value: str) -> Iterable[tuple[int, str]]:
        """Assignments whose name and value match these patterns, one a name."""
        hits = {a.name: a for a in self.assigned if re.fullmatch(name, a.name) and re.fullmatch(value, a.value)}
        return [(a.line, f"{a.name}={a.value}") for a in hits.values()]

    def _fill(self, text: str, sign: str) -> str:
        def value(match: re.Match[str]) -> str:
            known = self.variables.get(match[1] or match[2], match[0])
            return re.sub(r"(?<!\S)#.*|[\"']", "", known[1:-1]) if known[:1] == "(" else known  # an array's words

        return re.sub(rf"{re.escape(sign)}(?:(\w+)|\{{(\w+)(?:\[[@*]\])?\}})", value, text)

    def _words(self, words: list[Word], sign: str) -> Iterator[Word]:
        for word in words:
            text = self._fill(word.text, sign)
            split = text != word.text and (not word.quoted or word.text.endswith("[@]}")) and "=" not in word.text
            yield from (word._replace(text=part) for part in (FIELD.findall(text) if split else [text]))

    def _steps(self, words: list[Word], command: Command, index: int, srun: dict[str, str] | None = None,
               wrappers: frozenset[str] = frozenset(), sign: str = "$") -> Iterator[Step]:  # fmt: skip
        """What a command comes to, also inside bash -c, eval and trap."""
        if not (words := list(self._words(words, sign))):
            return  # $EMPTY
        words = self._assign(words, command)
        while words and ((name := base(words[0].text)) == "srun" or WRAPPERS.fullmatch(name)):
            if name == "srun":
                found, rest = options([w.text for w in words[1:]], words[0].line, SRUN)
                srun, words = {o.name: o.value for o in found}, words[len(words) - len(rest) :] if rest else []
            else:
                at = next((i for i, w in enumerate(words) if i and PROGRAM.fullmatch(base(w.text))), 0)
                if not at:
                    break
                wrappers, words = wrappers | {name}, words[at:]
        if not words:
            return
        yield Step(words, command, srun, wrappers, index)
        first, code = base(words[0].text), ""
        if first in ("bash", "sh"):
            code = next((w.text for flag, w in itertools.pairwise(words) if re.fullmatch(r"-\w*c", flag.text)), "")
        elif first in ("eval", "trap") and len(words) > 1:
            code = " ".join(w.text for w in words[1:]) if first == "eval" else words[1].text
        sign = "$" if first == "eval" else LATE
        wrappers |= {f"{first} {len(wrappers)}"}
        for inner in Code(code, sign, words[-1].line).commands if code and len(wrappers) < 9 else ():
            around = frozenset(["function"]) if first == "trap" else command.inside
            inner = inner._replace(end=inner.end or command.end, inside=around)
            yield from self._steps(list(inner.words), inner, index, srun, wrappers, sign)

    def _assign(self, words: list[Word], command: Command) -> list[Word]:
        """Takes note of assignments; the words after those that come first."""
        rest = list(itertools.dropwhile(lambda w: re.match(r"\w+\+?=", w.text), words))
        declares = words[0].text in ("export", "declare", "local", "readonly", "typeset", "env")
        for word in words if declares else words[: len(words) - len(rest)]:
            if match := re.match(r"(\w+)(\+?)=(.*)", word.text, re.DOTALL):
                self.assigned.append(Setting(match[1], match[3], word.line))
                unsure = match[2] or (command.inside and match[1] in self.variables) or len(match[3]) > 10_000
                self.variables[match[1]] = f"${match[1]}" if unsure else match[3]
        for word in words[1:] if words[0].text in ("for", "read") else ():
            self.variables.pop(word.text, None)
        return rest
