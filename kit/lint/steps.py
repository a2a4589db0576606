"""The steps of a batch script: its commands with known variables filled in and without the programs that start them."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from kit.lint.options import SRUN, Setting, parse_options
from kit.lint.shell import LATER, NOW, Code, Command, Word, program_name

# Programs that start another one.
WRAPPERS = re.compile(
    r"env|time|nohup|exec|command|stdbuf|numactl|timeout|nice|singularity|apptainer|uv|poetry|pixi|conda|mamba|nsys"
    r"|taskset|setsid|ssh|mpirun|mpiexec|pdsh|clush"
)
# What a wrapper's options end at: the first word that is one of these.
PROGRAM = re.compile(r"torchrun|accelerate|deepspeed|python[\d.]*|bash|sh|srun|pip3?")
# Programs whose failure is not a failure of the training, even under srun.
HELPERS = re.compile(
    r"hostname|nvidia-smi|echo|date|mkdir|cp|rm|ls|sleep|ray|scontrol|bash|sh|cat|printenv|true|pip|ip|touch|kill|module"
    r"|cd|export|source|\.|set|unset|ulimit|umask|trap|read|wait|exit|test|\[\[?|for|case"
)
LAUNCHER_MODULES = {"torch.distributed.run": "torchrun", "accelerate.commands.launch": "accelerate"}
LAUNCHERS = ("torchrun", "torch.distributed.launch", "accelerate")  # they start one rank for each GPU
DECLARATIONS = ("export", "declare", "local", "readonly", "typeset", "env")
FIELD = re.compile(r"(?:\$\((?:[^()]|\([^()]*\))*\)|\S)+")  # a field after word splitting, with $(a b) in one piece
LONGEST_VALUE = 10_000  # characters; a longer value counts as unknown, since variables can double at each line
DEEPEST = 8  # wrappers and nested shells around a command; a script may call itself


@dataclass(frozen=True)
class Step:
    """A program that the script runs.

    words: of the program, with known variables filled in. command: as it is in the script. srun: the options of the
    srun that starts it, by long name; None without srun. wrappers: names of the programs that start it.
    index: of the script's command that it comes from.
    """

    words: Sequence[Word]
    command: Command
    srun: Mapping[str, str] | None
    wrappers: frozenset[str]
    index: int

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
        for word, following in itertools.pairwise([*self.words[start:], Word("-", 0)]):
            if word.text.endswith(".py") or word.text in ("-m", "--module"):
                break
            if word.text.startswith("--"):
                name, equals, value = word.text[2:].partition("=")
                if not equals and not following.text.startswith("-"):
                    value = following.text
                found[name.replace("-", "_")] = Setting(name, value, word.line)
        return found

    def option(self, *names: str) -> str:
        """The value of the first of these options that is given; "" where none is."""
        return next((self.options[name].value for name in names if name in self.options), "")

    @cached_property
    def trains(self) -> bool:
        """Whether its failure should be the job's failure, as far as the script does not handle it."""
        if {"condition", "function"} & self.command.inside:
            return False
        if self.program in (*LAUNCHERS, "deepspeed"):
            return True
        if self.srun is not None and not HELPERS.fullmatch(self.program):
            return True
        file = r"\S+\.py" if self.srun is None else r"\S+\.(py|sh)"
        interpreter = re.match(r"python|(ba)?sh$", self.program)
        return bool(interpreter) and any(re.fullmatch(file, text) for text in self.texts)


@dataclass
class Scope:
    """The variables of the batch shell, as far as the script sets them.

    variables: values by name. Those that are not known refer to themselves ("$NAME"). assignments: all, in order.
    """

    variables: dict[str, str] = field(default_factory=dict)
    assignments: list[Setting] = field(default_factory=list)

    def expand(self, words: Sequence[Word], dollar: str) -> list[Word]:
        """The words with known variables filled in, split into fields as the shell would."""
        return [field for word in words for field in self._fields(word, dollar)]

    def _fields(self, word: Word, dollar: str) -> Iterator[Word]:
        text = self._fill(word.text, dollar)
        splits = not word.quoted or word.text.endswith("[@]}")
        if text == word.text or "=" in word.text or not splits:
            yield word._replace(text=text)
        else:
            yield from (word._replace(text=piece) for piece in FIELD.findall(text))

    def _fill(self, text: str, dollar: str) -> str:
        def value(match: re.Match[str]) -> str:
            known = self.variables.get(match[1] or match[2], match[0])
            return _array_words(known) if known.startswith("(") else known

        return re.sub(rf"{re.escape(dollar)}(?:(\w+)|\{{(\w+)(?:\[[@*]\])?\}})", value, text)

    def assign(self, words: Sequence[Word], command: Command) -> list[Word]:
        """Take the assignments of a command into account. Returns the words after those at its beginning."""
        rest = list(itertools.dropwhile(lambda word: re.match(r"\w+\+?=", word.text), words))
        first = words[0].text
        for word in words if first in DECLARATIONS else words[: len(words) - len(rest)]:
            self._assign_one(word, command)
        if first in ("for", "read"):
            for word in words[1:]:
                self.variables.pop(word.text, None)
        return rest

    def _assign_one(self, word: Word, command: Command) -> None:
        match = re.match(r"(\w+)(\+?)=(.*)", word.text, re.DOTALL)
        if not match:
            return
        name, appends, value = match[1], match[2], match[3]
        self.assignments.append(Setting(name, value, word.line))
        may_not_run = bool(command.inside) and name in self.variables
        unknown = appends or may_not_run or len(value) > LONGEST_VALUE
        self.variables[name] = f"${name}" if unknown else value


def _array_words(value: str) -> str:
    """The words of an array, "(a b)", without comments and quotes."""
    return re.sub(r"(?<!\S)#.*|[\"']", "", value[1:-1])


@dataclass(frozen=True)
class _Caller:
    """What runs a command.

    index: of the script's command. depth: nested shells. dollar: the dollar sign that the innermost shell expands.
    """

    index: int
    srun: Mapping[str, str] | None = None
    wrappers: frozenset[str] = frozenset()
    depth: int = 0
    dollar: str = NOW


class _Program(NamedTuple):
    """A program's words without those that start it."""

    words: Sequence[Word]
    srun: Mapping[str, str] | None
    wrappers: frozenset[str]


def read_steps(commands: Sequence[Command], scope: Scope) -> list[Step]:
    """The steps of these commands, in order, also those inside bash -c, eval and trap. Fills the scope."""
    return [step for index, command in enumerate(commands) for step in _steps(command, _Caller(index), scope)]


def _steps(command: Command, caller: _Caller, scope: Scope) -> Iterator[Step]:
    words = scope.expand(command.words, caller.dollar)
    if not words:  # a variable without a value
        return
    program = _unwrap(scope.assign(words, command), caller)
    if not program.words:
        return
    yield Step(program.words, command, program.srun, program.wrappers, caller.index)
    if len(program.wrappers) + caller.depth < DEEPEST:
        yield from _nested_steps(program, command, caller, scope)


def _unwrap(words: Sequence[Word], caller: _Caller) -> _Program:
    """Take off srun with its options, and wrappers up to the program that they start."""
    srun, wrappers = caller.srun, caller.wrappers
    while words:
        name = program_name(words[0].text)
        if name == "srun":
            parsed = parse_options([word.text for word in words[1:]], words[0].line, SRUN)
            srun = {option.name: option.value for option in parsed.options}
            words = words[len(words) - len(parsed.rest) :]
        elif WRAPPERS.fullmatch(name):
            started = (index for index, word in enumerate(words) if PROGRAM.fullmatch(program_name(word.text)))
            start = next((index for index in started if index > 0), 0)
            if not start:
                break
            wrappers, words = wrappers | {name}, words[start:]
        else:
            break
    return _Program(words, srun, wrappers)


def _nested_steps(program: _Program, command: Command, caller: _Caller, scope: Scope) -> Iterator[Step]:
    """The steps of code that the program runs: bash -c, eval, trap."""
    name, code = program_name(program.words[0].text), _nested_code(program.words)
    if not code:
        return
    dollar = NOW if name == "eval" else LATER
    inner_caller = _Caller(caller.index, program.srun, program.wrappers, caller.depth + 1, dollar)
    inside = frozenset(["function"]) if name == "trap" else command.inside
    for inner in Code(code, dollar, program.words[-1].line).commands:
        inner = replace(inner, inside=inside, operator=inner.operator or command.operator)
        yield from _steps(inner, inner_caller, scope)


def _nested_code(words: Sequence[Word]) -> str:
    """The shell code in the arguments of bash -c, eval and trap; "" for other programs."""
    name = program_name(words[0].text)
    if name in ("bash", "sh"):
        pairs = itertools.pairwise(words)
        return next((following.text for word, following in pairs if re.fullmatch(r"-\w*c", word.text)), "")
    if name == "eval":
        return " ".join(word.text for word in words[1:])
    if name == "trap" and len(words) > 1:
        return words[1].text
    return ""
