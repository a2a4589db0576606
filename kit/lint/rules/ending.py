"""KS5: how the job ends. Exit codes, background processes, signals, and resuming after an interruption."""

import itertools
import re
from collections.abc import Iterator, Sequence

from kit.lint.rule import Hit, rule
from kit.lint.script import Script
from kit.lint.shell import Command
from kit.lint.steps import SHELLS, TRAINING, Step

CONTAINERS = {"singularity", "apptainer", "shifter"}
LONG_HOURS = 12
OWN_JOB = re.compile(r"\$\{?SLURM_JOB_?ID\}?|\$\{?SLURM_ARRAY_JOB_ID\}?(_\$\{?SLURM_ARRAY_TASK_ID\}?)?")


@rule("KS501")
def exit_code_is_lost(script: Script) -> Iterator[Hit]:
    main = script.main
    if main and _is_lost_in_nested_shell(script, main):
        yield Hit(main.line, main.program)
        return
    ended = _wait_that_notes_failure(script, main) if main and main.command.operator == "&" else main
    if not main or not ended or ended.command.operator not in (("", ";") if ended is main else ("||",)):
        return
    after = script.commands_after(ended)
    if after and after[-1].text == "exit":  # it keeps the exit code of the command before it
        after = after[:-1]
    cancels = any(step.index > ended.index and _cancels_own_job(step) for step in script.steps)  # KS510
    if not after or after[-1].name == "wait" or cancels or _checks_result(after[-1]):
        return
    has_error_trap = any("ERR" in step.texts for step in script.steps)
    errexit = script.errexit and ended is main
    if not errexit and not has_error_trap and not _ends_with_failure(script, after):
        yield Hit(main.line, main.program, milder=_reads_status(after) or ended is not main)


def _is_lost_in_nested_shell(script: Script, main: Step) -> bool:
    """Whether the shell of bash -c or of a heredoc goes on after the training, and ends with a command that works."""
    inside = [step for step in script.steps if step.index == main.index and step.depth == main.depth > 0]
    after = inside[inside.index(main) + 1 :] if inside else []
    if not after or not after[-1].helps or after[-1].program in ("exit", "wait", "test", "[", "[["):
        return False
    shells = [step for step in script.steps if step.index == main.index and step.depth < main.depth]
    errexit = any(re.search(r"^set .*-\w*e|^\S*sh -\w*e", step.text) for step in [*shells, *inside])
    fails = any(re.search(r"\$\?|PIPESTATUS|^(exit|return) [1-9$]", step.text) for step in after)
    return main.command.operator in ("", ";") and not errexit and not fails


def _wait_that_notes_failure(script: Script, main: Step) -> Step | None:
    """The last `wait PID || failed=1` after a training in the background."""
    waits = [step for step in script.steps if step.index > main.index and step.program == "wait"]
    noted = waits and waits[-1].command.operator == "||" and len(waits[-1].words) > 1
    following = script.code.commands[waits[-1].index + 1 :] if noted else []
    return waits[-1] if following and re.fullmatch(r"\w+=\S*", following[0].text) else None


def _checks_result(last: Command) -> bool:
    """Whether the last command fails where the training left no result, as `test -f model.bin` does."""
    return not last.inside and (last.name in ("test", "[", "[[") or (last.name == "ls" and len(last.words) > 1))


def _reads_status(commands: Sequence[Command]) -> bool:
    return any("$?" in command.text for command in commands)


def _ends_with_failure(script: Script, after: Sequence[Command]) -> bool:
    """Whether something ends the job with another exit code than that of the last command.

    That is an exit, or a function with one that may read $?.
    """
    inside_functions = [command for command in script.code.commands if "function" in command.inside]
    called = {command.name for command in after}
    functions = inside_functions if _reads_status(after) or called & script.functions else []
    return any(re.search(r"\b(exit|return) [1-9$]", command.text) for command in [*after, *functions])


@rule("KS502")
def exit_code_of_pipeline(script: Script) -> Iterator[Hit]:
    training = [command for command in script.code.commands if TRAINING.search(command.text)]
    functions = {kind.removeprefix("function ") for command in training for kind in command.inside}
    started = [step for step in script.steps if step.trains or step.program in functions & script.functions]
    piped = [step for step in started if step.command.operator in ("|", "|&")]
    if not script.pipefail:
        yield from (Hit(step.line, step.program) for step in piped[:1])  # one line corrects all


@rule("KS503")
def background_without_wait(script: Script) -> Iterator[Hit]:
    found = {hit.milder: hit for hit in reversed(list(_not_waited_for(script)))}
    yield from found.values()  # the first of each kind: one wait corrects all


def _not_waited_for(script: Script) -> Iterator[Hit]:
    for step in script.trainings:
        later = script.steps[script.steps.index(step) + 1 :]
        foreground = any(_takes_time(other) for other in later)
        waits = [other for other in later if other.program == "wait"]
        with_arguments = any(len(wait.words) > 1 for wait in waits)
        if step.command.operator == "&" and not foreground and not with_arguments:
            yield Hit(step.line, step.program, milder=bool(waits))


def _takes_time(step: Step) -> bool:
    """Whether the script goes on while this step runs, or ends a background process itself, such as a server."""
    if step.command.operator == "&" or "function" in step.command.inside:
        return False
    runs_file = step.program in SHELLS and len(step.words) > 1
    return step.trains or runs_file or step.program == "kill" or "while" in step.command.inside or not step.helps


@rule("KS504")
def next_step_after_failure(script: Script) -> Iterator[Hit]:
    if script.errexit:
        return
    yield from itertools.islice(_followed_by_another(script), 1)  # set -e corrects all


def _followed_by_another(script: Script) -> Iterator[Hit]:
    for step, following in itertools.pairwise(script.trainings):
        between = " ".join(command.text for command in script.code.commands[step.index + 1 : following.index])
        one_after_the_other = step.index != following.index and step.command.operator in ("", ";")
        may_run = following.command in script.commands_after(step)
        if one_after_the_other and may_run and not re.search(r"\$\?|PIPESTATUS", between):
            yield Hit(step.line, step.program)


@rule("KS505")
def nothing_resumes(script: Script) -> Iterator[Hit]:
    if not script.main or script.resumes:
        return
    request = script.request
    line = request.line_of("requeue", "time")
    if request.has("requeue"):
        yield Hit(line, "The job is requeued when a node fails")
    elif request.hours >= LONG_HOURS:
        yield Hit(line, f"The job may run {request.hours:g} hours")


@rule("KS510")
def job_cancels_itself(script: Script) -> Iterator[Hit]:
    yield from (Hit(step.line, step.text) for step in script.steps if _cancels_own_job(step))


def _cancels_own_job(step: Step) -> bool:
    own_id = any(OWN_JOB.fullmatch(word) for word in step.texts)
    only_signals = any(re.match(r"-s|--signal|-b|--batch", word) for word in step.texts)
    return step.program == "scancel" and own_id and not only_signals


@rule("KS509")
def scontrol_in_container(script: Script) -> Iterator[Hit]:
    for step in script.steps:
        contained = (step.wrappers | {step.program}) & CONTAINERS or "container-image" in (step.srun or {})
        literal = [part.text for word in step.command.words for part in word.parts if not part.now]
        if any("scontrol" in text for text in literal) and contained:
            yield Hit(step.line, "This")
