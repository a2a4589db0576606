"""Rules that rules.toml describes completely, by regular expressions; this module registers them.

The key `find` of such a rule names kinds of places in a script (PLACES), each with the expression that is searched
there. What the group "detail", or else the expression, matches replaces {} in the message. The rule applies where all
conditions hold (CONDITIONS): a directive matches `where`, none matches `unless`, nothing in the script matches
`unless_text`, and with `several_nodes` the job may have more than one node. Directives have the form name=value.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from kit.lint.rule import RULE_TEXTS, Hit, rule
from kit.lint.script import Script


class Place(NamedTuple):
    """A text in a script and its line. Settings have the form name=value."""

    line: int
    text: str


def _directives(script: Script) -> Iterator[Place]:
    return (Place(option.line, f"{option.name}={option.value}") for option in script.request.accepted.values())


def _launcher_options(script: Script) -> Iterator[Place]:
    options = (option for step in script.steps for option in step.options.values())
    return (Place(option.line, f"{option.name}={option.value}") for option in options)


def _variables(script: Script) -> Iterator[Place]:
    """Assignments, but for those that the profile of the cluster makes as well."""
    for variable in script.scope.assignments:
        if script.site.environment.get(variable.name) != variable.value:
            yield Place(variable.line, f"{variable.name}={variable.value}")


PLACES: dict[str, Callable[[Script], Iterator[Place]]] = {
    "text": lambda script: iter([Place(1, script.text)]),
    "row": lambda script: (Place(line, row) for line, row in enumerate(script.rows, 1)),
    "command": lambda script: (Place(command.line, command.text) for command in script.code.commands),
    "step": lambda script: (Place(step.line, step.text) for step in script.steps),
    "srun_step": lambda script: (Place(step.line, step.text) for step in script.steps if step.srun is not None),
    "launcher": lambda script: (Place(step.line, step.program) for step in script.launches),
    "launcher_option": _launcher_options,
    "directive": _directives,
    "variable": _variables,
}


def _has_directive(script: Script, pattern: str) -> bool:
    return any(re.search(pattern, place.text) for place in _directives(script))


CONDITIONS: dict[str, Callable[[Script, Any], bool]] = {
    "where": _has_directive,
    "unless": lambda script, pattern: not _has_directive(script, pattern),
    "unless_text": lambda script, pattern: not re.search(pattern, script.text),
    "several_nodes": lambda script, _: script.nodes != 1,
}


def _find(row: Mapping[str, Any], script: Script) -> Iterator[Hit]:
    if not all(CONDITIONS[name](script, row[name]) for name in CONDITIONS.keys() & row):
        return
    for kind in PLACES.keys() & row:
        found: dict[object, Hit] = {}
        for place in PLACES[kind](script):
            if match := re.search(row[kind], place.text):
                detail = match["detail"] if match.groupdict() else match[0]
                # Of a variable that is set several times, the last value counts.
                key = place.text.partition("=")[0] if kind == "variable" else place
                found[key] = Hit(place.line, detail, found=detail)
        yield from found.values()


for _id, _text in RULE_TEXTS.items():
    if _text.find:
        rule(_id)(partial(_find, _text.find))
