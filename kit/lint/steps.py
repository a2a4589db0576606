"""The steps of a batch script: its commands with known variables filled in and without the programs that start them."""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from kit.lint.options import SRUN, parse_options
from kit.lint.shell import Code, Command, Part, Parts, Setting, Word, after, merge, plain, program_name

# Programs that start another one.
WRAPPERS = re.compile(
    r"env|time|nohup|exec|command|stdbuf|numactl|timeout|nice|singularity|apptainer|uv|poetry|pixi|conda|mamba|nsys"
    r"|docker|podman|podman-hpc|enroot|shifter|ch-run|taskset|setsid|ssh|mpirun|mpiexec|pdsh|clush"
)
# What a wrapper's options end at: the first word that is one of these.
PROGRAM = re.compile(r"torchrun|accelerate|deepspeed|python[\d.]*|bash|sh|dash|zsh|ksh|srun|pip3?")
# Programs whose failure is not a failure of the training, even under srun.
HELPERS = re.compile(
    r"hostname|nvidia-smi|echo|date|mkdir|cp|rm|ls|sleep|ray|scontrol|bash|sh|cat|printenv|true|pip|ip|touch|kill|module"
    r"|cd|export|source|\.|set|unset|ulimit|umask|trap|read|wait|exit|test|\[\[?|for|case"
    r"|lscpu|lspci|lsblk|lsmod|lstopo|lshw|lsof|free|df|du|uname|uptime|nproc|getconf|id|whoami|who|ps|top|vmstat|iostat"
    r"|env|which|type|command|whereis|nvcc|gcc|rocm-smi|rocminfo|amd-smi|xpu-smi|dcgmi|nvtop|gpustat|numactl|taskset"
    r"|ifconfig|ibstat|ibstatus|ibv_devinfo|ibdev2netdev|ss|netstat|ping|getent|dig|nslookup|mount|findmnt|quota|sysctl"
    r"|dmesg|printf|grep|egrep|awk|sed|head|tail|tee|find|stat|wc|sort|cut|tr|seq|pwd|readlink|realpath|dirname|basename"
    r"|squeue|sinfo|sacct|sstat|seff|pip3|conda|mamba|pkill|killall|mv|ln|chmod|rsync|sync|false|:|collect_env"
    r"|torch\.utils\.collect_env|torch\.cuda|platform|site|sysconfig|venv|accelerate|"
)
# A program that prints something about itself or runs a line of Python, and trains nothing.
PROBE = re.compile(r"\S+ (--version|-V|--help|-h)|\S*python[\d.]*( -[a-zA-Z]+)* -c .*", re.DOTALL)
LAUNCHER_MODULES = {"torch.distributed.run": "torchrun", "accelerate.commands.launch": "accelerate"}
LAUNCHERS = ("torchrun", "torch.distributed.launch", "accelerate")  # they start one rank for each GPU
SHELLS = ("bash", "sh", "dash", "zsh", "ksh")
DECLARATIONS = ("export", "declare", "local", "readonly", "typeset", "env")
# What is left together by word splitting, or is between; in an expansion $(a b) is left together.
FIELD = re.compile(r"\s+|\S+")
FIELD_OF_EXPANSION = re.compile(r"\s+|(?:\$\((?:[^()]|\([^()]*\))*\)|\S)+")
REFERENCE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:\[[@*]\])?\})")
# A command line that starts a training, in the value of a variable.
TRAINING = re.compile(r"\b(torchrun|accelerate launch|deepspeed|torch\.distributed\.\w+|python[\d.]* (-u )?\S+\.py)\b")
LONGEST_VALUE = 10_000  # characters; a longer value counts as unknown, since variables can double at each line
DEEPEST = 8  # wrappers and nested shells around a command; a script may call itself


@dataclass(frozen=True)
class Step:
    """A program that the script runs.

    words: of the program, with known variables filled in. command: as it is in the script. srun: the options of the
    srun that starts it, by long name; None without srun. wrappers: names of the programs that start it.
    index: of the script's command that it comes from. depth: how many nested shells run it. hidden_training: whether
    the program is a variable whose value is not known, but some value of which starts a training.
    """

    words: Sequence[Word]
    command: Command
    index: int
    srun: Mapping[str, str] | None = None
    wrappers: frozenset[str] = frozenset()
    depth: int = 0
    hidden_training: bool = False

    @property
    def line(self) -> int:
        """Where the command begins."""
        return self.command.line

    @cached_property
    def texts(self) -> list[str]:
        """The words as plain text."""
        return [word.text for word in self.words]

    @cached_property
    def text(self) -> str:
        """The words with a space between."""
        return " ".join(self.texts)

    @cached_property
    def program(self) -> str:
        """The name of the program; "torchrun" and "accelerate" also where they are started by `python -m`."""
        module = re.match(r"\S*python[\d.]*( -\w+)*? -m (\S+)", self.text)
        if module:
            return LAUNCHER_MODULES.get(module[2], module[2])
        name = program_name(self.texts[0])
        return "" if name == "accelerate" and self.texts[1:2] != ["launch"] else name

    @cached_property
    def options(self) -> dict[str, Setting]:
        """The launcher's own options, which end at the training script, by name with "_" for "-"."""
        if self.program not in (*LAUNCHERS, "deepspeed"):
            return {}
        found: dict[str, Setting] = {}
        start = self.texts.index("-m") + 2 if program_name(self.texts[0]).startswith("python") else 0
        for word, following in itertools.pairwise([*self.words[start:], Word((Part("-"),), 0)]):
            if word.text.endswith(".py") or word.text in ("-m", "--module"):
                break
            if word.text.startswith("--"):
                name, equals, _ = word.text[2:].partition("=")
                setting = Setting(name, after(word.parts, len(f"--{name}=")), word.line)
                if not equals and not following.text.startswith("-"):
                    setting = Setting(name, following.parts, word.line)
                found[name.replace("-", "_")] = setting
        return found

    def option(self, *names: str) -> str:
        """The value of the first of these options that is given; "" where none is."""
        return next((self.options[name].value for name in names if name in self.options), "")

    @property
    def starts_share_of_nodes(self) -> bool:
        """Whether srun starts it on some of the job's nodes, as one of several such commands or turns of a loop."""
        repeated = self.command.operator == "&" or {"do", "for", "while", "function", "subshell"} & self.command.inside
        return self.srun is not None and bool(repeated or {"nodelist", "relative"} & self.srun.keys())

    @property
    def helps(self) -> bool:
        """Whether the program prepares, reports or waits, so that its failure is not one of the training."""
        return bool(HELPERS.fullmatch(self.program))

    @cached_property
    def trains(self) -> bool:
        """Whether its failure should be the job's failure, as far as the script does not handle it."""
        if {"condition", "function"} & self.command.inside or PROBE.fullmatch(self.text):
            return False
        if self.hidden_training:
            return True
        if self.program in (*LAUNCHERS, "deepspeed"):
            return True
        if self.srun is not None and not self.helps:
            return True
        file = r"\S+\.py" if self.srun is None else r"\S+\.(py|sh)"
        interpreter = re.match(r"python|(ba)?sh$", self.program)
        return bool(interpreter) and any(re.fullmatch(file, text) for text in self.texts)


@dataclass
class Scope:
    """The variables of the batch shell, as far as the script sets them.

    variables: values by name. Those that are not known refer to themselves ("$NAME"). assignments: all, in order.
    """

    variables: dict[str, Parts] = field(default_factory=dict)
    assignments: list[Setting] = field(default_factory=list)

    def expand(self, words: Sequence[Word], now: bool) -> list[Word]:
        """The words with known variables filled in, split into fields as the shell would.

        now: in what the batch shell expands; else in what it leaves, which a later shell with these variables reads.
        """
        return [field for word in words for field in self._fields(word, now)]

    def _fields(self, word: Word, now: bool) -> Iterator[Word]:
        if not any(part.now is now and "$" in part.text for part in word.parts):
            yield word
            return
        parts = merge(filled for part in word.parts for filled in (self._fill(part) if part.now is now else [part]))
        splits = not word.quoted or word.text.endswith("[@]}")
        fields = [parts] if parts == word.parts or "=" in word.text or not splits else _split(parts)
        yield from (word._replace(parts=field) for field in fields)

    def _fill(self, part: Part) -> Iterator[Part]:
        position = 0
        for match in REFERENCE.finditer(part.text):
            value = self.variables.get(match[1] or match[2])
            if value is not None:
                yield Part(part.text[position : match.start()], part.now)
                yield from (_array_words(value) if plain(value).startswith("(") else value)
                position = match.end()
        yield Part(part.text[position:], part.now)

    def may_start_training(self, step: Step) -> bool:
        """Whether the program, or what eval runs, is a variable one of whose assignments starts a training."""
        words = step.texts[1:] if step.program == "eval" else step.texts
        match = REFERENCE.fullmatch(words[0]) if words else None
        name = (match[1] or match[2]) if match else None
        return any(setting.name == name and TRAINING.search(setting.value) for setting in self.assignments)

    def assign(self, words: Sequence[Word], command: Command) -> list[Word]:
        """Take the assignments of a command into account. Returns the words after those at its beginning."""
        rest = list(itertools.dropwhile(lambda word: re.match(r"\w+\+?=", word.text), words))
        first = words[0].text if words else ""
        for word in words if first in DECLARATIONS else words[: len(words) - len(rest)]:
            self._assign_one(word, command)
        if first in ("for", "read"):
            for word in words[1:]:
                self.variables.pop(word.text, None)
        return rest

    def _assign_one(self, word: Word, command: Command) -> None:
        match = re.match(r"(\w+)(\+?)=", word.text)
        if not match:
            return
        name, appends = match[1], match[2]
        setting = Setting(name, after(word.parts, match.end()), word.line)
        self.assignments.append(setting)
        may_not_run = bool(command.inside) and name in self.variables
        unknown = appends or may_not_run or len(setting.value) > LONGEST_VALUE
        self.variables[name] = (Part(f"${name}", now=True),) if unknown else setting.parts


def _array_words(value: Parts) -> Iterator[Part]:
    """The words of an array, "(a b)", without comments and quotes."""
    for part in value:
        yield Part(re.sub(r"\A\(|\)\Z|(?<!\S)#.*|[\"']", "", part.text), part.now)


def _split(parts: Parts) -> Iterator[Parts]:
    """Cut at white space."""
    field: list[Part] = []
    for part in parts:
        for piece in (FIELD_OF_EXPANSION if part.now else FIELD).findall(part.text):
            if not piece.isspace():
                field.append(Part(piece, part.now))
            elif field:
                yield tuple(field)
                field = []
    if field:
        yield tuple(field)


def first_of_each_command(steps: Iterable[Step]) -> list[Step]:
    """The first step of each command of the script: a command may run a shell with many programs."""
    first: dict[int, Step] = {}
    for step in steps:
        first.setdefault(step.index, step)
    return list(first.values())


def read_steps(commands: Sequence[Command], scope: Scope) -> list[Step]:
    """The steps of these commands, in order, also those inside bash -c, eval and trap. Fills the scope."""
    return [step for n, command in enumerate(commands) for step in _steps(Step((), command, n), scope, now=True)]


def _steps(started: Step, scope: Scope, now: bool) -> Iterator[Step]:
    """The step of a command, and those inside it. started: what is known of it: the command, and what starts it."""
    words = scope.assign(scope.expand(started.command.words, now), started.command)
    step = _unwrap(started, words)
    if not step.words:
        return
    step = replace(step, hidden_training=scope.may_start_training(step))
    yield step
    if len(step.wrappers) + step.depth < DEEPEST:
        yield from _nested_steps(step, scope, now)


def _unwrap(started: Step, words: Sequence[Word]) -> Step:
    """The step of these words without srun and its options, and without wrappers before the program that they start."""
    srun, wrappers = started.srun, started.wrappers
    while words:
        name = program_name(words[0].text)
        if name == "srun":
            parsed = parse_options([word.text for word in words[1:]], words[0].line, SRUN)
            srun = {option.name: option.value for option in parsed.options}
            words = words[len(words) - len(parsed.rest) :]
        elif WRAPPERS.fullmatch(name):
            programs = (index for index, word in enumerate(words) if PROGRAM.fullmatch(program_name(word.text)))
            start = next((index for index in programs if index > 0), 0)
            if not start:
                break
            wrappers, words = wrappers | {name}, words[start:]
        else:
            break
    return replace(started, words=words, srun=srun, wrappers=wrappers)


def _nested_steps(step: Step, scope: Scope, now: bool) -> Iterator[Step]:
    """The steps of code that the program runs. now: whether the batch shell runs the step."""
    code = _nested_code(step, now) or _code_on_stdin(step, scope, now)
    inside = frozenset(["function"]) if step.program == "trap" else step.command.inside
    for inner in code.commands if code else ():
        command = replace(inner, inside=inside, operator=inner.operator or step.command.operator)
        wrappers = step.wrappers | ({"ssh"} if step.program == "ssh" else set())
        started = replace(step, command=command, wrappers=wrappers, depth=step.depth + 1)
        yield from _steps(started, scope, now and step.program == "eval")


def _nested_code(step: Step, now: bool) -> Code | None:
    """The code in the arguments of bash -c, eval and trap; None for other programs."""
    words, line = step.words, step.words[-1].line
    if step.program == "eval":
        parts = tuple(part for word in words[1:] for part in (*word.parts, Part(" ")))
        return Code(plain(parts), first_line=line) if now else Code.of_later_shell(parts, line)
    options = [index for index, word in enumerate(words[:-1]) if re.fullmatch(r"-\w*c", word.text)]
    if step.program in SHELLS and options:
        return Code.of_later_shell(words[options[0] + 1].parts, line)
    return Code.of_later_shell(words[1].parts, line) if step.program == "trap" and len(words) > 1 else None


def _code_on_stdin(step: Step, scope: Scope, now: bool) -> Code | None:
    """The code that << or <<< gives to a shell without a script, or to ssh."""
    given = step.command.stdin
    reads = step.program == "ssh" or (step.program in SHELLS and all(word.startswith("-") for word in step.texts[1:2]))
    if given is None or not reads:
        return None
    expanded = scope.expand([given], now)
    return Code.of_later_shell(expanded[0].parts, given.line) if expanded else None
