"""Rules: the decorator that registers one, what it returns, and its severity and texts from rules.toml."""

import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from kit.lint.script import Script

Severity = Literal["error", "warning", "info"]


class Hit(NamedTuple):
    """A place where a rule applies.

    detail: replaces {} in the rule's message. found, replacement: for a fix, the text in the line that is wrong, and
    what to write instead where only the rule knows it.
    """

    line: int
    detail: str = ""
    found: str = ""
    replacement: str = ""


Find = Callable[[Script], Iterable[Hit]]


@dataclass(frozen=True)
class RuleText:
    """An entry of rules.toml. message: with {} for the detail of a hit."""

    severity: Severity
    message: str
    fix: str


@dataclass(frozen=True)
class Rule:
    """A rule: its id such as "KS201", or "KS201b" for a milder form of it, its texts, and how it is found."""

    id: str
    text: RuleText
    find: Find

    @property
    def code(self) -> str:
        """The id that findings have: without the letter."""
        return self.id[:5]


RULE_TEXTS = {
    id: RuleText(**entry)
    for id, entry in tomllib.loads(Path(__file__).with_name("rules.toml").read_text(encoding="utf-8")).items()
}
RULES: dict[str, Rule] = {}  # by id; filled by the modules in kit/lint/rules


def rule(id: str) -> Callable[[Find], Find]:
    """Register a function as the rule with this id. It returns the places in a script where the rule applies."""

    def register(find: Find) -> Find:
        RULES[id] = Rule(id, RULE_TEXTS[id], find)
        return find

    return register
