"""Fills the shell templates of this folder (job.sbatch, node.sh, tokens.sh). They are valid shell before and after.

`'{{name}}'` is replaced by a value, or by several words, quoted for the shell. A comment line `# {{name}}` is replaced
by lines of shell code, or by nothing.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

PLACEHOLDER = re.compile(r"^# \{\{(?P<code>\w+)\}\}\n|'\{\{(?P<value>\w+)\}\}'", re.MULTILINE)


def fill(file: str, values: Mapping[str, str | Sequence[str]], code: Mapping[str, str]) -> str:
    """The template with every placeholder filled. `code` ends with a line break, or is empty.

    Raises ValueError for a placeholder without a value, and for a value without a placeholder.
    """
    template = Path(__file__).with_name(file).read_text(encoding="utf-8")
    found = list(PLACEHOLDER.finditer(template))
    for kind, given in (("value", values), ("code", code)):
        wanted = {match[kind] for match in found if match[kind]}
        if wanted != given.keys():
            raise ValueError(f"{file}: the placeholders for {kind} are {sorted(wanted)}, given are {sorted(given)}.")

    def replacement(match: re.Match[str]) -> str:
        if match["code"]:
            return code[match["code"]]
        value = values[match["value"]]
        return shlex.quote(value) if isinstance(value, str) else shlex.join(value)

    return PLACEHOLDER.sub(replacement, template)
