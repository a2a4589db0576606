"""Lint a config file of DeepSpeed: keys that it refuses or never reads, and comments, which accelerate refuses."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kit.lint.lint import Finding

RELEASE = "0.19.8"
REFUSED, IGNORED = (
    {section: frozenset(names.split()) for section, names in sections.items()}
    for sections in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).values()
)
TOP_LEVEL = ("aio", "fp16", "bf16")  # sections that people write into zero_optimization
TOKEN = re.compile(r'"(?P<text>(?:[^"\\]|\\.)*)"(?P<colon>\s*:)?|(?P<comment>//.*|/\*[\s\S]*?\*/)|[{}]')


class Key(NamedTuple):
    """A key of a config. section: the dotted keys above it, empty at the top; line: from 1."""

    section: str
    name: str
    line: int


def lint_deepspeed(text: str, file: str) -> list[Finding]:
    """The findings in a config file of DeepSpeed, by line."""
    findings = [_of_key(key, file) for key in _keys(text)]
    comment = next((match for match in TOKEN.finditer(text) if match["comment"]), None)
    if comment:
        message = "accelerate and transformers read the file as plain JSON, which has no comments."
        findings.append(Finding(file, "KS702", "error", _line(text, comment), message, "Remove the comments."))
    return sorted((found for found in findings if found), key=lambda finding: finding.line)


def _keys(text: str) -> Iterator[Key]:
    """All keys, also of a file that is not quite JSON."""
    path: list[str] = []
    name = ""
    for match in TOKEN.finditer(text):
        if match["colon"]:
            name = match["text"]
            yield Key(".".join(path[1:]), name, _line(text, match))
        elif match[0] == "{":
            path.append(name)
        elif match[0] == "}" and path:
            path.pop()


def _line(text: str, match: re.Match[str]) -> int:
    return text.count("\n", 0, match.start()) + 1


def _of_key(key: Key, file: str) -> Finding | None:
    if key.section in REFUSED and key.name not in REFUSED[key.section]:
        place = f'"{key.name}" is not a key of {key.section}, and DeepSpeed {RELEASE} refuses the file'
        move = f"Move {key.name} to the top level." if key.name in TOP_LEVEL else f"Remove {key.name}."
        return Finding(file, "KS701", "error", key.line, f"{place}.", move)
    known = next((names for section, names in IGNORED.items() if section == key.section.rpartition(".")[2]), None)
    if known is not None and key.name not in known:
        message = f'"{key.name}" is not a key of {key.section}: DeepSpeed {RELEASE} never reads it.'
        return Finding(file, "KS701", "warning", key.line, message, f"Remove {key.name}.")
    return None
