"""KS1: what sbatch reads. Directives that it refuses, ignores or misunderstands, and scripts that it refuses."""

import difflib
import re
import shutil
import subprocess
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

from kit.lint.options import KNOWN, OPTIONS, SINCE, Directive, Option, Problem, parse_options
from kit.lint.rule import Hit, rule
from kit.lint.script import Script

DASH = r"(?:[\u2010-\u2015\u2212]|â€[\"”“])"  # outside ASCII; the second form is UTF-8 that was read as CP1252
SPACE = r"[\u00a0\u2000-\u200b\u202f\u3000\ufeff]"
QUOTE = r"[\u201c-\u201f]"
# A line that was meant as a directive: "# SBATCH --nodes=2", "#SABTCH -N 2"
ALMOST_DIRECTIVE = re.compile(r"([ \t]*)(#?)([ \t]*)(\w{5,7})(?=[ \t]+--?\w)")
EXAMPLE = re.compile(
    r"\s*#+\s*sbatch\b"
)  # a comment that shows how to submit the script, if a file follows the options
TEMPLATES = (".j2", ".jinja", ".jinja2", ".template", ".tmpl", ".tpl", ".in", ".mustache")
PLACEHOLDER = re.compile(r"<[^<>]+>|(?<!\$)\{[\w ]+\}|\{\{.*\}\}")
# Values of options that name something of the cluster; in a job's name or a folder they are plain words.
PLACEHOLDER_NAME = re.compile(
    r"(?i:change[-_]?me)|TODO|(?i:your)([-_.@ ].*|[A-Z]\w*)|\[[A-Za-z_ ]+\]|([A-Za-z]+[-_])?(?:x{3,}|X{3,})"
    r"|PARTITION|ACCOUNT|QOS|.*@example\.(com|org)"
)
NAMES_OF_CLUSTER = ("account", "partition", "qos", "reservation", "mail-user", "clusters", "licenses")
# Parts of a path that are written in documentation only: /path/to/x, your_output_directory/x, xxx/logs
PLACEHOLDER_FOLDER = re.compile(
    r"/path/to(?=/)|(?:^|(?<=/))(?:x{3,}(?=/)|your[-_](?:own[-_])?(?:\w+[-_])?(?:user(?:name)?|name|id|home|dir|directory"
    r"|folder|path|project|workspace|account|group|scratch|repo)(?=/|$))"
)
PATH_OPTIONS = ("output", "error", "input", "chdir", "container-image", "container-mounts", "container-workdir")
EXCLUSIVE = [*combinations(("mem", "mem-per-cpu", "mem-per-gpu"), 2), ("cpus-per-gpu", "cpus-per-task")]


@rule("KS101")
def not_ascii(script: Script) -> Iterator[Hit]:
    for line, words in script.request.directives:
        yield from (Hit(line, word, found=word) for word in words if _has_foreign_characters(word))
    for command in script.code.commands:
        if command.name not in ("echo", "printf"):
            for word in command.words:
                if not word.quoted and re.match(rf"{DASH}-?[A-Za-z]", word.text):
                    yield Hit(word.line, word.text, found=word.text)


def _has_foreign_characters(word: str) -> bool:
    return bool(re.match(DASH, word) or re.search(f"{SPACE}|{QUOTE}", word))


@rule("KS102")
def directive_after_command(script: Script) -> Iterator[Hit]:
    if re.match(r"\s*\{%", script.rows[script.body_line - 1]):  # a template's statement is not a command
        return
    for comment in script.code.comments:
        row = script.rows[comment.line - 1]
        if comment.line > script.body_line and row.startswith("#SBATCH"):
            yield Hit(comment.line, row.strip())


@rule("KS103")
def almost_directive(script: Script) -> Iterator[Hit]:
    for line, row in enumerate(script.rows[: script.body_line], 1):
        match = None if row.startswith("#SBATCH") or _shows_command(row) else ALMOST_DIRECTIVE.match(row)
        if match and difflib.SequenceMatcher(None, match[4].upper(), "SBATCH").ratio() >= 0.8:
            yield Hit(line, row.strip())


def _shows_command(row: str) -> bool:
    """Whether a comment shows a command such as `sbatch --nodes=4 train.sh`, or one that is continued."""
    match = EXAMPLE.match(row)
    words = row[match.end() :].partition(" #")[0].split() if match else []
    return bool(parse_options(words, 1).rest or words[-1:] == ["\\"])


@rule("KS105")
def dos_line_ends(script: Script) -> Iterator[Hit]:
    before, line_end, _ = script.raw.partition("\r\n")
    if line_end:
        yield Hit(before.count("\n") + 1)


@rule("KS106")
def variable_in_directive(script: Script) -> Iterator[Hit]:
    for option in script.request.options:
        if option.name not in ("comment", "wrap") and re.search(r"\$[\w({]|`|^~", option.value):
            yield Hit(option.line, option.value)


@rule("KS107")
def placeholder(script: Script) -> Iterator[Hit]:
    """One finding for all placeholders of a script, which is used as it was published."""
    hits = [] if _is_template(script) else sorted(_placeholders(script))
    if hits:
        names = list(dict.fromkeys(hit.detail for hit in hits))
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        yield hits[0]._replace(detail=", ".join(names[:4]) + more)


def _is_template(script: Script) -> bool:
    """Whether the file's name says that a program or a person fills it in before it is submitted."""
    return script.file.endswith(TEMPLATES) or "template" in Path(script.file).name


def _placeholders(script: Script) -> Iterator[Hit]:
    for line, words in script.request.directives:
        match = PLACEHOLDER.search(" ".join(words))
        if match and not any(word.startswith("--comment") for word in words):
            yield Hit(line, match[0])
    for name in NAMES_OF_CLUSTER:
        value = script.request.value(name)
        if PLACEHOLDER_NAME.fullmatch(value):
            yield Hit(script.request.line_of(name), value)
    for name in PATH_OPTIONS:
        if match := PLACEHOLDER_FOLDER.search(script.request.value(name)):
            yield Hit(script.request.line_of(name), match[0])


@rule("KS108")
def wrong_option(script: Script) -> Iterator[Hit]:
    wrong = list(_wrong_options(script))
    yield from wrong
    unknown = {
        option.name: Hit(option.line, option.value, milder=True)
        for option in reversed(script.request.options)
        if option.problem and option.value.isascii() and option.line not in {hit.line for hit in wrong}
    }
    yield from unknown.values()  # each once, where it is given first


def _wrong_options(script: Script) -> Iterator[Hit]:
    other_rules = (not_ascii, _placeholders, variable_in_directive)
    skipped = {hit.line for find in other_rules for hit in find(script)}
    for operand in script.request.operands:
        if operand.line not in skipped:
            yield Hit(operand.line, f"{operand.value} is not an option")
    empty = [option for option in script.request.options if _has_no_value(option)]
    if empty:
        yield Hit(empty[0].line, f"{', '.join(f'--{option.name}' for option in empty)} without a value")
    with_one_dash = [hit for directive in script.request.directives for hit in _long_options_with_one_dash(directive)]
    yield from with_one_dash
    skipped |= {option.line for option in empty} | {hit.line for hit in with_one_dash}
    for option in script.request.options:
        problem = "" if option.line in skipped else _option_problem(option, script.site.release)
        if problem:
            yield Hit(option.line, problem)
    yield from _more_than_the_cluster_has(script)


def _has_no_value(option: Option) -> bool:
    """Whether the value after "=" is missing, and sbatch refuses that."""
    form, _ = KNOWN["forms"].get(option.name, ("", ""))
    return not option.problem and option.value == "" and bool(form) and not re.fullmatch(form, "")


def _option_problem(option: Option, release: str) -> str:
    """What is wrong with an option, or ""."""
    if option.problem:
        return _parsing_problem(option)
    form, hint = KNOWN["forms"].get(option.name, (".*", ""))
    if not re.fullmatch(form, option.value, re.IGNORECASE) or option.value.startswith("="):
        return f"--{option.name} cannot be {option.value!r}" + (f"; it must be {hint}" if hint else "")
    if release and release < SINCE.get(option.name, ""):
        return f"--{option.name} needs Slurm {SINCE[option.name]}, and this is {release}"
    return ""


def _parsing_problem(option: Option) -> str:
    """Why getopt refuses an option. Not for an unknown long option: a plug-in may have added it."""
    similar = difflib.get_close_matches(option.name.replace("_", "-"), OPTIONS, 1, 0.8)
    if option.problem is Problem.UNKNOWN and option.value.startswith("--") and not similar:
        return ""
    return option.complaint + (f" (did you mean --{similar[0]}?)" if similar else "")


def _long_options_with_one_dash(directive: Directive) -> Iterator[Hit]:
    for word in directive.words:
        if re.match(r"-\w[\w-]+", word) and word[1:].partition("=")[0] in OPTIONS:
            yield Hit(directive.line, f"{word} is read as -{word[1]} with the value {word[2:]!r}")


def _more_than_the_cluster_has(script: Script) -> Iterator[Hit]:
    site, request = script.site, script.request
    if site.nodes is not None and (script.nodes or 0) > site.nodes:
        line = request.line_of("nodes", "gres", "gpus-per-node")
        yield Hit(line, f"the job asks for {script.nodes} nodes, and the cluster has {site.nodes}")
    if site.gpus_per_node is not None and (script.gpus_per_node or 0) > site.gpus_per_node:
        line = request.line_of("gpus", "gres", "gpus-per-node")
        asked, available = script.gpus_per_node, site.gpus_per_node
        yield Hit(line, f"the job asks for {asked} GPUs per node, and the cluster has {available}")


@rule("KS109")
def exclusive_options(script: Script) -> Iterator[Hit]:
    request = script.request
    for one, other in EXCLUSIVE:
        if request.has(one) and request.has(other) and not request.heterogeneous:
            yield Hit(max(request.line_of(one), request.line_of(other)), f"--{one} and --{other}")


@rule("KS110")
def option_given_twice(script: Script) -> Iterator[Hit]:
    if script.request.heterogeneous:
        return
    for option in script.request.options:
        if not option.problem and option.name != "mail-type":
            last = script.request.accepted[option.name]
            if last.value != option.value:
                yield Hit(last.line, option.name)


@rule("KS111")
def bash_syntax(script: Script) -> Iterator[Hit]:
    bash = shutil.which("bash")
    if not bash or not re.match(r"#!.*\b(ba)?sh\b", script.rows[0]) or _is_template(script):
        return
    source = script.text.encode(errors="surrogateescape")
    done = subprocess.run([bash, "-n"], input=source, capture_output=True, check=False)
    match = re.search(r"line (\d+): (.*)", done.stderr.decode(errors="replace"))
    if done.returncode and match:
        message = match[2].replace("unexpected token", "unexpected")  # a detail with "token" is hidden as a secret
        yield Hit(min(int(match[1]), len(script.rows)), message)  # bash counts on beyond an unexpected end
