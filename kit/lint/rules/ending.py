"""KS5: how the job ends. Exit codes, background processes, signals, and resuming after an interruption."""

import re
from collections.abc import Iterator
from itertools import pairwise

from kit.lint.rule import Hit, rule
from kit.lint.script import Script
from kit.lint.shell import DOLLAR
from kit.lint.steps import Step

CONTAINERS = {"singularity", "apptainer", "shifter"}
SETUP_FILE = re.compile(r"activate|conda|bashrc|profile|modules?\b|/etc/|\.?env(\.sh)?$")  # without traps in them
SIGNAL_NUMBERS = {"10": "USR1", "12": "USR2", "15": "TERM"}
LONG_HOURS = 12


@rule("KS501")
def exit_code_is_lost(script: Script) -> Iterator[Hit]:
    """Commands after the training whose exit code becomes the job's."""
    main = script.main
    after = script.code.commands[main.index + 1 :] if main else []
    if not main or not after or after[-1].name == "wait" or main.command.operator not in ("", ";"):
        return
    text = " ".join(command.text for command in after)
    has_error_trap = any("ERR" in step.texts for step in script.steps)
    if not script.errexit and not has_error_trap and not re.search(r"\$\?|\bexit [1-9$]", text):
        yield Hit(main.line, main.program)


@rule("KS502")
def exit_code_of_pipeline(script: Script) -> Iterator[Hit]:
    """A training in a pipeline without pipefail."""
    for step in script.trainings:
        if step.command.operator in ("|", "|&") and not script.pipefail:
            yield Hit(step.line, step.program)


def _in_background(script: Script, waited: bool) -> Iterator[Hit]:
    """Trainings in the background, with no training in the foreground after them.

    waited: those that a `wait` without arguments follows; otherwise those without any `wait`.
    """
    for step in script.trainings:
        later = [other for other in script.steps if other.index > step.index]
        foreground = any(other.trains and other.command.operator != "&" for other in later)
        waits = [other for other in later if other.program == "wait"]
        with_arguments = any(len(wait.words) > 1 for wait in waits)
        in_background = step.command.operator == "&" and not foreground
        if in_background and not with_arguments and bool(waits) == waited:
            yield Hit(step.line, step.program)


@rule("KS503")
def background_without_wait(script: Script) -> Iterator[Hit]:
    """A training in the background that nothing waits for."""
    yield from _in_background(script, waited=False)


@rule("KS503b")
def exit_code_of_bare_wait(script: Script) -> Iterator[Hit]:
    """A training in the background whose exit code `wait` does not return."""
    yield from _in_background(script, waited=True)


@rule("KS504")
def next_step_after_failure(script: Script) -> Iterator[Hit]:
    """Two trainings, of which the second also runs after the first has failed."""
    if script.errexit:
        return
    for step, following in pairwise(script.trainings):
        between = " ".join(command.text for command in script.code.commands[step.index + 1 : following.index])
        one_after_the_other = step.index != following.index and step.command.operator in ("", ";")
        if one_after_the_other and not re.search(r"\$\?|PIPESTATUS", between):
            yield Hit(step.line, step.program)


@rule("KS505")
def nothing_resumes(script: Script) -> Iterator[Hit]:
    """A job that is long or requeued, in which nothing resumes."""
    if not script.main or script.resumes:
        return
    request = script.request
    line = request.line_of("requeue", "time")
    if request.has("requeue"):
        yield Hit(line, "The job is requeued when a node fails")
    elif request.hours >= LONG_HOURS:
        yield Hit(line, f"The job may run {request.hours:g} hours")


@rule("KS506")
def signal_without_effect(script: Script) -> Iterator[Hit]:
    """A warning signal and a trap that do not match."""
    match = re.match(r"(?:([RB]+):)?(?:SIG)?(\w+)", script.request.value("signal").upper())
    if not match or any("exec" in step.wrappers for step in script.steps):
        return
    line, name = script.request.line_of("signal"), SIGNAL_NUMBERS.get(match[2], match[2])
    traps = _traps(script, name)
    to_batch_shell = "B" in (match[1] or "")
    if not to_batch_shell:
        if any(trap.texts[1] for trap in traps):
            yield Hit(line, f"without B: only the steps get {name}, and the trap never runs")
    elif not traps:
        if not _sources_other_files(script):
            yield Hit(line, f"B: sends {name} to the batch shell, which has no trap for it and dies with its steps")
    elif script.main and script.main.command.operator != "&":
        program = script.main.program
        yield Hit(line, f"bash runs its trap for {name} only after {program}, which is in the foreground, has ended")


def _traps(script: Script, signal: str) -> list[Step]:
    """The trap commands for a signal."""
    traps = (step for step in script.steps if step.program == "trap")
    return [trap for trap in traps if signal in (word.removeprefix("SIG") for word in trap.texts[2:])]


def _sources_other_files(script: Script) -> bool:
    """Whether the script sources a file that may set traps."""
    sourced = (step.texts[-1] for step in script.steps if step.program in ("source", "."))
    return any(not SETUP_FILE.search(file) for file in sourced)


@rule("KS507")
def signal_of_nccl(script: Script) -> Iterator[Hit]:
    """USR1 as the warning signal of a job with GPUs."""
    signal = script.request.value("signal")
    if script.request.has_gpus and re.search(r"(^|:)(SIG)?(USR1|10)\b", signal.upper()):
        yield Hit(script.request.line_of("signal"), signal)


@rule("KS508")
def requeue_of_array(script: Script) -> Iterator[Hit]:
    """scontrol requeue with a job id that may be the array's."""
    if not script.request.has("array"):
        return
    for step in script.steps:
        if step.texts[:2] == ["scontrol", "requeue"]:
            job_ids = (text for text in step.texts if re.fullmatch(DOLLAR + r"\{?SLURM_JOB_?ID\}?", text))
            yield from (Hit(step.line, text) for text in job_ids)


@rule("KS509")
def scontrol_in_container(script: Script) -> Iterator[Hit]:
    """scontrol inside a container."""
    for step in script.steps:
        contained = (step.wrappers | {step.program}) & CONTAINERS or "container-image" in (step.srun or {})
        if "scontrol" in step.command.text and contained:
            yield Hit(step.line, "This")
