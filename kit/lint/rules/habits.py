"""KS6: secrets and habits. Secrets in the script, and settings that slow down or break jobs on some clusters."""

import re
from collections.abc import Iterator

from kit.lint.rule import Hit, rule
from kit.lint.script import Script
from kit.lint.secret import NOT_YET_FILLED_IN, SECRET, SECRET_NAME
from kit.lint.shell import variables

# Built-in commands of bash: their words do not appear in the list of processes.
BUILTINS = re.compile(r"export|declare|local|readonly|echo|printf|read|test|\[\[?|:|for|case")


@rule("KS601")
def secret(script: Script) -> Iterator[Hit]:
    texts = [(line, match[0]) for line, row in enumerate(script.rows, 1) for match in SECRET.finditer(row)]
    texts += [(setting.line, setting.value) for setting in script.scope.assignments if SECRET_NAME.search(setting.name)]
    logins = (step for step in script.steps if re.match(r"wandb login .*\b[0-9a-f]{40}$", step.text))
    texts += [(step.line, step.texts[-1]) for step in logins]
    yield from (Hit(line, "This line") for line, text in texts if _is_random(text))


def _is_random(text: str) -> bool:
    """Whether a text is a secret, and not an expansion or a placeholder such as hf_xxxxxxxx."""
    return bool(re.fullmatch(r"[\w+/=-]{20,}", text)) and len(set(text)) > 10 and not NOT_YET_FILLED_IN.search(text)


@rule("KS602")
def secret_on_command_line(script: Script) -> Iterator[Hit]:
    for directive in script.request.directives:
        if any(_exports_secret(word) for word in directive.words):
            yield Hit(directive.line, "--export")
    for step in script.steps:
        if BUILTINS.fullmatch(step.program):
            continue
        for word in step.command.words:
            if _exports_secret(word.text) or _is_secret_argument(word.text):
                yield Hit(step.line, re.sub(r"=(?!\$).*", "", word.text))


def _exports_secret(word: str) -> bool:
    """Whether it is --export=NAME=value with the name of a secret."""
    return word.startswith("--export=") and any(SECRET_NAME.search(name) for name in re.findall(r"(\w+)=", word))


def _is_secret_argument(word: str) -> bool:
    """Whether it contains a secret's variable, and is not an assignment, which is passed in the environment."""
    return any(SECRET_NAME.search(name) for name in variables(word)) and not re.match(r"\w+=", word)


@rule("KS603")
def secret_in_trace(script: Script) -> Iterator[Hit]:
    for setting in script.scope.assignments:
        if SECRET_NAME.search(setting.name):
            modes = (step.text for step in script.steps if step.program == "set" and step.line < setting.line)
            traced = [mode for mode in modes if re.search(r" [-+]\w*x|xtrace", mode)]
            if traced and " +" not in traced[-1]:
                yield Hit(setting.line, setting.name)


@rule("KS607")
def one_cpu_thread(script: Script) -> Iterator[Hit]:
    if "OMP_NUM_THREADS" in script.scope.variables:
        return
    for step in script.launches:
        if step.program != "accelerate" and step.option("nproc_per_node") not in ("", "1"):
            yield Hit(step.line)


@rule("KS609")
def buffered_output(script: Script) -> Iterator[Hit]:
    step = script.main
    if step is None or "PYTHONUNBUFFERED" in script.scope.variables:
        return
    if "unbuffered" not in (step.srun or {}) and "-u" not in step.texts:
        yield Hit(step.line)
