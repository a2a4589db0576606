"""Rules: their severity and texts from rules.toml, how they are registered, and the places that they return."""

import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from kit.lint.script import Script

Severity = Literal["error", "warning", "info"]


class Hit(NamedTuple):
    """A place where a rule applies.

    detail: replaces {} in the rule's message. found, replacement: for a fix, the text in the line that is wrong, and
    what to write instead where only the rule knows it. milder: whether the form with "b" after the id applies.
    """

    line: int
    detail: str = ""
    found: str = ""
    replacement: str = ""
    milder: bool = False


Find = Callable[[Script], Iterable[Hit]]


@dataclass(frozen=True)
class RuleText:
    """An entry of rules.toml. message: with {} for the detail of a hit. find: see `kit.lint.table`."""

    severity: Severity
    message: str
    fix: str
    find: Mapping[str, Any] = field(default_factory=dict)


RULE_TEXTS = {
    id: RuleText(**entry)
    for id, entry in tomllib.loads(Path(__file__).with_name("rules.toml").read_text(encoding="utf-8")).items()
}
RULES: dict[str, Find] = {}  # by id; filled by kit/lint/table.py and the modules in kit/lint/rules


def rule(id: str) -> Callable[[Find], Find]:
    """Register a function as the rule with this id. It returns the places in a script where the rule applies."""

    def register(find: Find) -> Find:
        RULES[id] = find
        return find

    return register
