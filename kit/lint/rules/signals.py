"""KS506: the warning signal of --signal, and whether it reaches the training.

Tried with Slurm 22.05, a time limit of two minutes, and a program that needs three seconds to save
(tests/lint/test_signals.py):

- Without B:, only steps get the signal: not the batch shell, and no program that it starts without srun, exec or not.
- With B:, only the process of the batch script gets it: a shell that has no trap ends at once. Slurm then sends TERM to
  the steps, and KILL after KillWait; programs without srun get only KILL. With exec, the program gets the signal.
- bash runs a trap when its command in the foreground has ended.
- srun passes USR1 and USR2 on to its tasks. TERM and HUP end the step with KILL, and INT does nothing at first.

Which processes of a step get a signal depends on ProctrackType. With proctrack/linuxproc all do, as tried. With
proctrack/cgroup, Slurm's default, only the children of slurmstepd do (_slurm_cgroup_is_pid_a_slurm_task in
proctrack_cgroup.c of SchedMD/slurm), and all are killed when these have ended. So a launcher or a shell between srun
and the training takes the signal.
"""

import re
from collections.abc import Iterator

from kit.lint.rule import Hit, rule
from kit.lint.script import Script
from kit.lint.shell import variables
from kit.lint.steps import LAUNCHERS, SHELLS, Step

SETUP_FILE = re.compile(r"activate|conda|bashrc|profile|modules?\b|/etc/|\.?env(\.sh)?$")  # without traps in them
SIGNAL_NUMBERS = {"1": "HUP", "2": "INT", "10": "USR1", "12": "USR2", "15": "TERM"}
LAUNCHERS_DIE_OF = ("USR1", "USR2", "ALRM")  # torchrun handles TERM, INT, HUP and QUIT (--signals-to-handle)
SHELLS_DIE_OF = ("USR1", "USR2", "ALRM", "TERM", "HUP")
SRUN_KILLS_AT = ("TERM", "HUP")
SRUN_KEEPS = ("INT",)


@rule("KS506")
def signal_without_effect(script: Script) -> Iterator[Hit]:
    match = re.match(r"(?:([RB]+):)?(?:SIG)?(\w+)", script.request.value("signal").upper())
    if match:
        line, name = script.request.line_of("signal"), SIGNAL_NUMBERS.get(match[2], match[2])
        find = _to_batch_shell if "B" in (match[1] or "") else _to_steps
        yield from (hit._replace(line=line) for hit in find(script, name))


def _to_steps(script: Script, name: str) -> Iterator[Hit]:
    if any(trap.texts[1] for trap in _traps(script, name) if not trap.depth):
        yield Hit(0, f"without B: only steps get {name}, and the batch shell's trap for it never runs")
    elif _has_no_step(script):
        yield Hit(0, f"without B: only steps get {name}, and without srun the job has no step")
    elif taker := _process_before_training(script, name):
        yield Hit(
            0,
            f"only {taker}, which srun starts, gets {name}, and Slurm kills the training when {taker} has ended",
            milder=True,
        )


def _to_batch_shell(script: Script, name: str) -> Iterator[Hit]:
    main = script.main
    if any("exec" in step.wrappers for step in script.steps):
        if main and main.srun is not None and name in SRUN_KILLS_AT:
            yield Hit(0, f"srun, which replaces the batch shell, kills its tasks when it gets {name}")
        return
    traps = _traps(script, name)
    if not traps:
        if not _sources_other_files(script):
            ends = "which has no trap for it and ends; Slurm then ends the steps within KillWait (usually 30 s)"
            yield Hit(0, f"B: sends {name} only to the batch shell, {ends}")
    elif main and main.command.operator != "&":
        yield Hit(0, f"bash runs its trap for {name} only after {main.program}, which is in the foreground, has ended")
    elif main and main.srun is not None and (sent := _signal_to_srun(script, main, traps)):
        does = "kills its tasks" if sent in SRUN_KILLS_AT else "does not pass it on"
        yield Hit(0, f"the trap sends {sent} to srun, which then {does}; srun passes on USR1 and USR2")


def _has_no_step(script: Script) -> bool:
    """Whether the training runs in the batch shell, and nothing in the script can start a step."""
    main = script.main
    if main is None or not (main.program.startswith("python") or main.program in LAUNCHERS):
        return False
    if (script.nodes or 1) > 1:  # KS304 reports that srun is missing
        return False
    return not re.search(r"\b(srun|mpirun|mpiexec|prun)\b|\S\.(sh|bash|sbatch|slurm)\b", script.text)


def _process_before_training(script: Script, name: str) -> str:
    """The launcher or shell that srun starts, that starts the training, and that dies of the signal; "" if none."""
    main = script.main
    if main is None or main.srun is None or any(trap.index == main.index for trap in _traps(script, name)):
        return ""
    if main.program in LAUNCHERS and name in LAUNCHERS_DIE_OF and "signals_to_handle" not in main.options:
        return main.program
    around = [step for step in script.steps if step.index == main.index]
    goes_on = around[-1] is not main and "exec" not in main.wrappers
    return around[0].program if main.depth and goes_on and around[0].program in SHELLS and name in SHELLS_DIE_OF else ""


def _traps(script: Script, signal: str) -> list[Step]:
    """The trap commands for a signal."""
    traps = (step for step in script.steps if step.program == "trap")
    return [trap for trap in traps if signal in (word.removeprefix("SIG") for word in trap.texts[2:])]


def _sources_other_files(script: Script) -> bool:
    """Whether the script sources a file that may set traps."""
    sourced = (step.texts[-1] for step in script.steps if step.program in ("source", "."))
    return any(not SETUP_FILE.search(file) for file in sourced)


def _signal_to_srun(script: Script, main: Step, traps: list[Step]) -> str:
    """The signal other than USR1 and USR2 that a trap, or the function that it calls, sends to the training's srun."""
    own = {setting.name for setting in script.scope.assignments if setting.value == "$!" and setting.line >= main.line}
    handlers = {f"function {trap.texts[1]}" for trap in traps}
    for step in script.steps:
        in_trap = step.index in {trap.index for trap in traps} or handlers & step.command.inside
        if step.program == "kill" and in_trap and own & {name for word in step.texts for name in variables(word)}:
            given = re.search(r"(?i)-(?:s |n )?(?:SIG)?(\w+)", step.text)
            sent = SIGNAL_NUMBERS.get(given[1], given[1].upper()) if given else "TERM"
            if sent in (*SRUN_KILLS_AT, *SRUN_KEEPS):
                return sent
    return ""
