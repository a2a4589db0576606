"""Options of sbatch and srun: which exist, how they are parsed, and the #SBATCH lines that sbatch reads."""

import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

KNOWN: dict[str, Any] = tomllib.loads(Path(__file__).with_name("slurm.toml").read_text(encoding="utf-8"))
SBATCH_OPTIONS: str = f"{KNOWN['sbatch']} {' '.join(KNOWN['later'].values())}"  # in the notation of slurm.toml
OPTIONS = {name.rstrip("=?") for name in re.sub(r"\b\w\|", "", SBATCH_OPTIONS).split()}
SINCE = {name.rstrip("=?"): release for release, names in KNOWN["later"].items() for name in names.split()}
VARIABLES = {f"SLURM_{name}" for name in KNOWN["variables"].split()}

ALIASES = {"tasks-per-node": "ntasks-per-node"}  # sbatch and srun accept it; the manual does not name it

_DIRECTIVE_WORD = re.compile(r"""#.*|(?:"[^"]*"|'[^']*'|\\\S|[^\s"'\\#])+|\S""", re.ASCII)


class Argument(StrEnum):
    """Whether an option takes a value, in the notation of slurm.toml."""

    NONE = ""
    REQUIRED = "="
    OPTIONAL = "?"


class Problem(StrEnum):
    """Why getopt refuses an option."""

    NONE = ""
    UNKNOWN = "is not recognized"
    AMBIGUOUS = "is ambiguous"
    NEEDS_VALUE = "needs a value"
    TAKES_NO_VALUE = "takes no value"


@dataclass(frozen=True)
class Option:
    """An option by its long name. With a problem: the name as it was given, and the complete word as its value."""

    name: str
    value: str
    line: int
    problem: Problem = Problem.NONE

    @property
    def complaint(self) -> str:
        """The problem in words."""
        given = self.value.partition("=")[0] if self.value.startswith("--") else self.value[:2]
        return f"option {given} {self.problem}"


class ParsedOptions(NamedTuple):
    """The leading options of a command, and the words after them."""

    options: list[Option]
    rest: list[str]


class Directive(NamedTuple):
    """An #SBATCH line: its number and its words, without quotes and without a comment at its end."""

    line: int
    words: list[str]


@dataclass(frozen=True)
class OptionTable:
    """The options of a program: what each long name takes, and the long name of each short one."""

    arguments: Mapping[str, Argument]
    long_names: Mapping[str, str]

    @classmethod
    @cache
    def parse(cls, text: str) -> "OptionTable":
        """A table in the notation of slurm.toml: short|long, then "=" for a value, "?" for an optional one."""
        entries = re.findall(r"(?:(\w)\|)?([\w-]+)([=?]?)", text)
        return cls(
            {long: Argument(argument) for _, long, argument in entries},
            {short: long for short, long, _ in entries if short},
        )


SBATCH = OptionTable.parse(SBATCH_OPTIONS)
SRUN = OptionTable.parse(f"{SBATCH_OPTIONS} {KNOWN['srun']} {KNOWN['site']}")


def sbatch_with_plugins(names: Collection[str]) -> OptionTable:
    """sbatch's options, with those of known plug-ins and with these, which may take a value."""
    return OptionTable.parse(f"{SBATCH_OPTIONS} {KNOWN['site']} {' '.join(f'{name}?' for name in sorted(names))}")


def parse_options(words: Sequence[str], line: int, table: OptionTable = SBATCH) -> ParsedOptions:
    """The leading options by getopt's rules (abbreviations, `-N2`, `--nodes 2`), and the words after them."""
    rest, options = list(words), []
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            break
        parse = _parse_long if word.startswith("--") else _parse_short
        options.append(parse(word, rest, line, table))
    return ParsedOptions(options, rest)


def _parse_long(word: str, rest: list[str], line: int, table: OptionTable) -> Option:
    """The option of a word such as --nodes=2. Its value may be the next word, which is then taken out of `rest`."""
    given, equals, value = word[2:].partition("=")
    names = [given] if given in table.arguments else [name for name in table.arguments if name.startswith(given)]
    if len(names) != 1:
        return Option(given, word, line, Problem.AMBIGUOUS if names else Problem.UNKNOWN)
    name, argument = ALIASES.get(names[0], names[0]), table.arguments[names[0]]
    if equals and argument is Argument.NONE:
        return Option(given, word, line, Problem.TAKES_NO_VALUE)
    if equals or argument is not Argument.REQUIRED:
        return Option(name, value, line)
    return Option(name, rest.pop(0), line) if rest else Option(given, word, line, Problem.NEEDS_VALUE)


def _parse_short(word: str, rest: list[str], line: int, table: OptionTable) -> Option:
    """The option of a word such as -N2. Further short options in the word are put back: -HO is -H -O."""
    given, value = word[1], word[2:]
    if given not in table.long_names:
        return Option(given, word, line, Problem.UNKNOWN)
    name = table.long_names[given]
    argument = table.arguments[name]
    if argument is Argument.NONE:
        if value:
            rest.insert(0, f"-{value}")
        return Option(name, "", line)
    if value or argument is Argument.OPTIONAL:
        return Option(name, value, line)
    return Option(name, rest.pop(0), line) if rest else Option(given, word, line, Problem.NEEDS_VALUE)


def directives(text: str) -> Iterator[Directive]:
    """Each #SBATCH line that sbatch reads: it stops at the first line that is neither blank nor a comment."""
    for line, row in enumerate(text.split("\n"), 1):
        if row.startswith("#SBATCH"):
            words = [match[0] for match in _DIRECTIVE_WORD.finditer(row[7:]) if match[0] != "\\"]
            comment = next((index for index, word in enumerate(words) if word.startswith("#")), len(words))
            yield Directive(line, [re.sub(r"[\"']|\\(.)", r"\1", word) for word in words[:comment]])
        elif row.strip() and not row.lstrip().startswith("#"):
            return


def number(text: str) -> int | None:
    """The value of decimal digits; None for any other text."""
    return int(text) if text.isdecimal() else None
