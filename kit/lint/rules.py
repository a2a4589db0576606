"""How what goes wrong in an sbatch script is found; kit/rules.toml has what is then said.

A rule gives (line, detail) of each hit. Sources: sbatch(1) and srun(1) of 22.05, what that sbatch accepts, CHANGELOG/
of SchedMD/slurm, torch.distributed.run, bash(1).
"""

import difflib
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from itertools import combinations, pairwise
from pathlib import Path

from kit.lint.script import ELASTIC, Script, Step
from kit.lint.shell import KNOWN, OPTIONS, SINCE, VARIABLES, number

Hits = Iterable[tuple[int, str]]

EXCLUSIVE = [*combinations(("mem", "mem-per-cpu", "mem-per-gpu"), 2), ("cpus-per-gpu", "cpus-per-task")]
TEMPLATES = (".j2", ".jinja", ".jinja2", ".template", ".tmpl", ".tpl", ".in", ".mustache")
PLACEHOLDER = re.compile(r"<[^<>]+>|(?<!\$)\{[\w ]+\}|\{\{.*\}\}|change_?me|\byour[-_. ]|\bTODO\b|=\[\w+\]$", re.I)
DEAD = re.compile(r"([ \t]*)(#?)([ \t]*)(\w{5,7})(?=[ \t]+--?\w)")
DASH, SPACE = r"(?:[\u2010-\u2015\u2212]|â€[\"”“])", r"[\u00a0\u2000-\u200b\u202f\u3000\ufeff]"
SIGN = r"[$\x1a]\{?"  # of a variable that expands here or in a later shell
REMOTE, CONTAINERS = {"ssh", "mpirun", "mpiexec", "pdsh", "clush"}, {"singularity", "apptainer", "shifter"}
BUILTINS = re.compile(r"export|declare|local|readonly|echo|printf|read|test|\[\[?|:|for|case")
SECRET_NAME = re.compile(r"(?:^|_)(?:TOKEN|API_?KEY|ACCESS_KEY|SECRET(?:_KEY)?|PASSWORD|PASSWD)$")
SECRET = re.compile(r"\b(?:hf_\w{30,}|gh[pousr]_\w{36}|sk-[\w-]{32,}|AKIA[0-9A-Z]{16}|glpat-[\w-]{20})\b")
SETUP = re.compile(r"activate|conda|bashrc|profile|modules?\b|/etc/|\.?env(\.sh)?$")  # sourced files that hold no traps
HOOK = re.compile(r"conda\.sh|shell\.\w+\W+hook|bashrc|profile\b|module load|^#!.* (-\w*l|--login)")
INSTALL = (
    r"(\S*python[\d.]* -m )?(uv )?pip3? install|(conda|mamba|micromamba) (env )?(install|create|update)"
    r"|git (clone|pull)|(sudo )?apt(-get)? (-y )?install"
)
LOCALHOST = r"(localhost|127\.0\.0\.\d+)(:.*)?|\x1a\(hostname\b.*|.*\|\|\s*echo ['\"]?(localhost|127\.).*"


def _when(found: object, line: int, detail: str = "") -> Hits:
    return [(line, detail)] if found else []


# What sbatch reads


def _unicode_dash(script: Script) -> Hits:
    for line, words in script.directives:
        yield from ((line, w) for w in words if re.match(DASH, w) or re.search(rf"{SPACE}|[\u201c-\u201f]", w))
    for command in (c for c in script.commands if c.words[0].text not in ("echo", "printf")):
        yield from ((w.line, w.text) for w in command.words if not w.quoted and re.match(rf"{DASH}-?[A-Za-z]", w.text))


def _dead_directive(script: Script) -> Hits:
    for line, row in enumerate(script.rows[: script.body], 1):
        match = None if row.startswith("#SBATCH") else DEAD.match(row)
        if match and difflib.SequenceMatcher(None, match[4].upper(), "SBATCH").ratio() >= 0.8:
            yield line, row.strip()


def _shell_in_directive(script: Script) -> Hits:
    plain = [o for o in script.asks if o.name not in ("comment", "wrap")]
    return [(o.line, o.value) for o in plain if re.search(r"\$[\w({]|`|^~", o.value)]


def _unfilled(script: Script) -> Hits:
    for line, words in script.directives:
        match = PLACEHOLDER.search(" ".join(words))
        if match and not any(w.startswith("--comment") for w in words):
            yield line, match[0]


def _bad_option(script: Script) -> Hits:
    skip = {line for find in (_unicode_dash, _unfilled, _shell_in_directive) for line, _ in find(script)}
    yield from ((line, f"{word} is no option") for line, word in script.operands if line not in skip)
    for o in (o for o in script.asks if o.line not in skip):
        form, hint = KNOWN["forms"].get(o.name, (".*", ""))
        near = difflib.get_close_matches(o.name.replace("_", "-"), OPTIONS, 1, 0.8) if o.problem else []
        if o.problem and ("not recognized" not in o.problem or near or not o.value.startswith("--")):
            yield o.line, o.problem + (f", did you mean --{near[0]}" if near else "")
        elif not o.problem and (not re.fullmatch(form, o.value, re.I) or o.value.startswith("=")):
            yield o.line, f"--{o.name} cannot be {o.value!r}" + (f", it is {hint}" if hint else "")
        elif script.site.release and script.site.release < SINCE.get(o.name, ""):
            yield o.line, f"--{o.name} came with Slurm {SINCE[o.name]}, and this is {script.site.release}"
    for line, words in script.directives:
        dashed = [w for w in words if re.match(r"-\w[\w-]+", w) and w[1:].partition("=")[0] in OPTIONS]
        yield from ((line, f"{w} is read as -{w[1]} with the value {w[2:]!r}") for w in dashed)
    site = script.site
    for name, asked, there in (("nodes", script.nodes, site.nodes), ("gpus", script.gpus, site.gpus_per_node)):
        text = f"the job asks for {asked} {name}{' a node' * (name == 'gpus')}, and the cluster has {there}"
        excess = there is not None and (asked or 0) > there
        yield from _when(excess, script.at(name, "gres", "gpus-per-node"), text)


def _bash_syntax(script: Script) -> Hits:
    bash = shutil.which("bash")
    if bash and re.match(r"#!.*\b(ba)?sh\b", script.rows[0]) and not script.file.endswith(TEMPLATES):
        done = subprocess.run([bash, "-n"], input=script.text.encode(errors="surrogateescape"), capture_output=True)
        if done.returncode and (match := re.search(r"line (\d+): (.*)", done.stderr.decode(errors="replace"))):
            yield min(int(match[1]), len(script.rows)), match[2]  # it counts on beyond an end that it did not expect


def _log_folder(script: Script, sure: bool) -> Hits:
    """Folders of logs that are not here; sure where they would be seen. From 23.02 on Slurm makes them itself."""
    made = {Path(word) for s in script.steps if s.program == "mkdir" for word in s.texts[1:]}
    for name in script.asked.keys() & {"output", "error"} if script.site.release < "23.02" else ():
        folder = Path(script.value(name)).parent
        if not any((place / folder).is_dir() for place in (Path(), Path(script.file).parent)):
            seen = Path(*folder.parts[:2]).is_dir() if folder.is_absolute() else Path(script.file).is_file()
            plain = not re.search(r"[$<{%~]", str(folder))
            yield from _when(plain and (seen or folder in made) == sure, script.at(name), str(folder))


# What the job asks for


def _no_time(script: Script) -> Hits:
    if not script.has("time"):
        yield 1, "There is no --time, so the partition's default decides and backfill cannot place the job early"
    elif script.hours > 24 and not script.resumes:
        long = f"{script.value('time')} is more than a day, waits long in the queue, and nothing resumes"
        yield script.at("time"), long


def _more_than_allocated(script: Script) -> Hits:
    for step in script.launches:
        ranks = number(step.get("nproc_per_node", "num_processes"))
        nodes = number((step.srun or {}).get("nodes", "")) or script.nodes
        wanted = number(step.get("nnodes", "num_machines"))
        room = (script.gpus or 0) * (1 if step.get("nproc_per_node") else nodes or 0)
        if ranks and room and ranks > room and not {"cpu", "use_cpu"} & step.options.keys():
            yield step.line, f"{ranks} ranks, but has {room} GPUs"
        launchers = nodes * (script.tasks_per_node(step) or wanted or 0) if nodes and step.srun is not None else nodes
        if wanted and launchers and (wanted > launchers or (step.srun is not None and nodes and wanted < nodes)):
            yield step.line, f"{wanted} nodes, but has {nodes}"


def _not_under_srun(script: Script) -> Hits:
    again = any(s.srun is not None and re.search(r"\$0|BASH_SOURCE", " ".join(s.texts)) for s in script.steps)
    for step in (s for s in script.launches if s.srun is None and "function" not in s.command.inside and not again):
        alone = step.get("nnodes", "num_machines") == "1" or "standalone" in step.options or step.wrappers & REMOTE
        yield from _when((script.nodes or 1) > 1 and not alone, step.line, step.program)


# Ranks and rendezvous


def _node_ranks(script: Script, sign: str, dynamic: bool) -> Iterator[tuple[int, str, Step]]:
    """Node ranks that expand where `sign` says, with a rendezvous that is dynamic (deals out ranks itself) or not."""
    for step in script.launches if script.nodes != 1 else ():
        for rank in (step.options[n] for n in ("node_rank", "machine_rank") if n in step.options):
            given = re.search(rf"{sign}\{{?SLURM_(PROCID|NODEID|LOCALID)", rank.value)
            if given and dynamic == (step.get("rdzv_backend") in ("c10d", "etcd", "etcd-v2")):
                yield rank.line, rank.value, step


def _endpoint(script: Script, pattern: str) -> Hits:
    given = script.given("MASTER_ADDR", "rdzv_endpoint", "master_addr", "main_process_ip")
    return [(a.line, a.value) for a in given if re.fullmatch(pattern, a.value, re.DOTALL)]


def _bad_random_port(script: Script) -> Hits:
    for port, line in script.ports.items():
        low = re.search(r"shuf\s+-i\s*(\d+)-", port)
        bare = re.fullmatch(r"[$\x1a](\{?RANDOM\}?|\(\(\s*\$?RANDOM\s*\)\))", port)
        apart = script.nodes != 1 and re.search(r"\x1a(\{?RANDOM|\(.*(RANDOM|shuf))", port)
        yield from _when((low and int(low[1]) < 1024) or bare or apart, line, port)


def _misspelt_variable(script: Script) -> Hits:
    known = VARIABLES | {a.name for a in script.assigned}
    for word in (w for w in script.words if "SLURM_" in w.text):
        for name in set(re.findall(rf"{SIGN}(SLURM_\w+)", word.text)) - known:
            near = difflib.get_close_matches(name, sorted(known), 1, 0.9) if "HET_GROUP" not in name else []
            yield from ((word.line, f"Slurm sets no {name}, but {n}") for n in near)


# How the job ends


def _lost_exit_code(script: Script) -> Hits:
    after = script.commands[script.main.index + 1 :] if script.main else []
    text = " ".join(c.text for c in after)
    checked = re.search(r"\$\?|\bexit [1-9$]", text) or script.errexit or any("ERR" in s.texts for s in script.steps)
    if script.main and after and after[-1].words[0].text != "wait" and not checked:
        yield from _when(script.main.command.end in ("", ";"), script.main.line, script.main.program)


def _in_background(script: Script, waited: bool) -> Hits:
    """Trainings in the background with none in front after them, which a bare wait follows, or no wait at all."""
    for step in (s for s in script.trainings if s.command.end == "&"):
        later = [s for s in script.steps if s.index > step.index]
        waits = [s.texts for s in later if s.program == "wait"]
        if not any(s.trains and s.command.end != "&" for s in later) and all(len(w) == 1 for w in waits):
            yield from _when(bool(waits) == waited, step.line, step.program)


def _unchecked_steps(script: Script) -> Hits:
    for step, after in pairwise(script.trainings if not script.errexit else ()):
        between = " ".join(c.text for c in script.commands[step.index + 1 : after.index])
        apart = step.index != after.index and step.command.end in ("", ";")
        yield from _when(apart and not re.search(r"\$\?|PIPESTATUS", between), step.line, step.program)


def _signal_mismatch(script: Script) -> Hits:
    match = re.match(r"(?:([RB]+):)?(?:SIG)?(\w+)", script.value("signal").upper())
    if not match or any("exec" in s.wrappers for s in script.steps):
        return
    name, line = {"10": "USR1", "12": "USR2", "15": "TERM"}.get(match[2], match[2]), script.at("signal")
    caught = [s.texts for s in script.steps if s.program == "trap"]
    traps = [t for t in caught if name in (word.removeprefix("SIG") for word in t[2:])]
    sourced = any(s.program in ("source", ".") and not SETUP.search(s.texts[-1]) for s in script.steps)
    if "B" not in (match[1] or ""):
        yield from _when(
            any(t[1] for t in traps), line, f"without B: only the steps get {name}, and the trap never runs"
        )
    elif not traps and not sourced:
        yield line, f"B: sends {name} to the batch shell, which has no trap for it and dies, and the steps with it"
    elif traps and script.main and script.main.command.end != "&":
        program = script.main.program
        yield line, f"bash runs its trap for {name} only after {program}, which is in the foreground, has ended"


# Secrets and habits


def _secret(script: Script) -> Hits:
    found = [(line, m[0]) for line, row in enumerate(script.rows, 1) for m in SECRET.finditer(row)]
    found += [(a.line, a.value) for a in script.assigned if SECRET_NAME.search(a.name)]
    found += [
        (s.line, s.texts[-1]) for s in script.steps if re.match(r"wandb login .*\b[0-9a-f]{40}$", " ".join(s.texts))
    ]
    literal = [line for line, text in found if re.fullmatch(r"[\w+/=-]{20,}", text) and len(set(text)) > 10]
    return [(line, "This line") for line in literal]  # hf_xxxxxxxx is a placeholder


def _secret_in_argv(script: Script) -> Hits:
    def exported(word: str) -> bool:
        return word.startswith("--export=") and any(map(SECRET_NAME.search, re.findall(r"(\w+)=", word)))

    for line, words in script.directives:
        yield from _when(any(map(exported, words)), line, "--export")
    for step in (s for s in script.steps if not BUILTINS.fullmatch(s.program)):
        for word in (w.text for w in step.command.words):
            used = any(map(SECRET_NAME.search, re.findall(rf"{SIGN}(\w+)", word))) and not re.match(r"\w+=", word)
            yield from _when(used or exported(word), step.line, re.sub(r"=(?![$\x1a]).*", "", word))


def _traced_secret(script: Script) -> Hits:
    for a in (a for a in script.assigned if SECRET_NAME.search(a.name)):
        modes = [" ".join(s.texts) for s in script.steps if s.program == "set" and s.line < a.line]
        traced = [m for m in modes if re.search(r" [-+]\w*x|xtrace", m)]
        yield from _when(traced and " +" not in traced[-1], a.line, a.name)


def _running(script: Script, pattern: str) -> Hits:
    found = ((s.line, re.match(pattern, " ".join(s.texts))) for s in script.steps)
    return [(line, match[0]) for line, match in found if match]


# fmt: off
RULES: dict[str, Callable[[Script], Hits]] = {
    "KS101": _unicode_dash,
    "KS102": lambda s: [(c.line, s.rows[c.line - 1].strip()) for c in s.comments if c.line > s.body
                        and s.rows[c.line - 1].startswith("#SBATCH")
                        and not re.match(r"\s*\{%", s.rows[s.body - 1])],
    "KS103": _dead_directive,
    "KS104": lambda s: _when(not s.text.startswith("#!"), 1),
    "KS105": lambda s: _when("\r\n" in s.raw, s.raw.partition("\r\n")[0].count("\n") + 1),
    "KS106": _shell_in_directive,
    "KS107": lambda s: [] if s.file.endswith(TEMPLATES) else _unfilled(s),
    "KS108": _bad_option,
    "KS108b": lambda s: [(o.line, o.value) for o in s.asks if o.problem and o.value.isascii()
                         and o.line not in {line for line, _ in _bad_option(s)}],
    "KS109": lambda s: [(max(s.at(a), s.at(b)), f"--{a} and --{b}") for a, b in EXCLUSIVE
                        if s.has(a) and s.has(b) and not s.het],
    "KS110": lambda s: [(last.line, o.name) for o in s.asks if not (s.het or o.problem or o.name == "mail-type")
                        and (last := s.asked[o.name]).value != o.value],
    "KS111": _bash_syntax,
    "KS201": lambda s: _log_folder(s, True),
    "KS201b": lambda s: _log_folder(s, False),
    "KS202": lambda s: [(o.line, o.value) for o in s.asked.values() if o.name in ("output", "error")
                        and not re.search(r"/dev/null|%\d*[jJ" + ("a]" if s.has("array") else "A]"), o.value)
                        and not s.value("open-mode").startswith("a")],
    "KS203": lambda s: _when(s.has("requeue") and not s.has("open-mode"), s.at("requeue")),
    "KS204": lambda s: [(o.line, o.value) for o in s.asked.values() if o.name in ("output", "error")
                        and re.search(r"%\d*[Aa]", o.value) and not s.has("array")],
    "KS301": _no_time,
    "KS302": _more_than_allocated,
    "KS303": lambda s: [(t.line, str(n)) for t in s.launches if t.srun is not None
                        and (n := s.tasks_per_node(t) or 1) > 1
                        and (t.get("nproc_per_node", "num_processes") or "1" * (t.program != "accelerate")) != "1"],
    "KS304": _not_under_srun,
    "KS305": lambda s: _when((number(s.value("ntasks")) or 1) > 1 and (s.has_gpus or s.launches)
                             and not s.has("nodes", "nodelist", "ntasks-per-node"), s.at("ntasks"), s.value("ntasks")),
    "KS306": lambda s: _when(s.has("gpus") and s.nodes != 1, s.at("gpus"), s.value("gpus")),
    "KS307": lambda s: _when(s.has("gpus-per-task") and not s.has("gpu-bind")
                             and max(number(s.value(n)) or 1 for n in ("ntasks-per-node", "ntasks")) > 1,
                             s.at("gpus-per-task"), s.value("gpus-per-task")),
    "KS308": lambda s: s.set_to("CUDA_VISIBLE_DEVICES", r"[\d,]+") if not s.has("exclusive")
                       and len({a.value for a in s.assigned if a.name == "CUDA_VISIBLE_DEVICES"}) == 1 else [],
    "KS309": lambda s: _when(s.has_gpus and not s.has("cpus-per-task", "cpus-per-gpu", "exclusive", "mincpus"),
                             min((o.line for o in s.asks if "gpu" in o.name + o.value), default=1)),
    "KS401": lambda s: [(line, rank) for line, rank, _ in _node_ranks(s, r"\$", False)],
    "KS401b": lambda s: [(line, rank) for line, rank, _ in _node_ranks(s, r"\$", True)],
    "KS402": lambda s: [(line, rank) for line, rank, step in _node_ranks(s, "\x1a", False)
                        if "PROCID" in rank and (s.tasks_per_node(step) or 1) > 1],
    "KS403": lambda s: _endpoint(s, SIGN + r"SLURM_(JOB_)?NODELIST\}?(:.*)?") if s.nodes != 1 else [],
    "KS404": lambda s: _endpoint(s, LOCALHOST) if (s.nodes or 1) > 1 else [],
    "KS405": lambda s: [(c.words[0].line, m[0]) for c in s.commands
                        if (m := re.search(r"\bhostname (-I|-i|--(all-)?ip-address(es)?)\b", c.text))],
    "KS406": lambda s: [(n, p) for p, n in s.ports.items() if p.isdecimal() and int(p) and not s.has("exclusive")],
    "KS407": _bad_random_port,
    "KS408": lambda s: [(a.line, a.value) for a in s.given("", "rdzv_id") if re.fullmatch(r"\w+", a.value)],
    "KS409": lambda s: [(t.line, t.texts[0].partition("=")[0] + "=...") for t in s.steps
                        if t.srun is not None and re.match(r"\w+=", t.texts[0])],
    "KS410": lambda s: [(t.line, "") for t in s.trainings if s.site.release[:5] in ("22.05", "23.02")
                        and t.srun is not None and s.value("cpus-per-task") not in ("", "1")
                        and "cpus-per-task" not in t.srun
                        and "SRUN_CPUS_PER_TASK" not in s.variables],
    "KS411": _misspelt_variable,
    "KS412": lambda s: [(line, "The node rank") for line, _, _ in _node_ranks(s, "\x1a", True)],
    "KS413": lambda s: [(t.line, str(n)) for t in s.launches if "standalone" in t.options
                        and (n := max(number(t.get("nnodes")) or 1,
                                      1 if t.srun is None else number(t.srun.get("nodes", "")) or s.nodes or 1)) > 1],
    "KS413b": lambda s: [(t.line, f"--{n}") for t in s.launches if "standalone" in t.options
                         for n in ("master_port", "rdzv_endpoint") if n in t.options],
    "KS414": lambda s: _running(s, r"(conda|source|\.) activate\b(?!\S)") if not HOOK.search(s.text) else [],
    "KS415": lambda s: [*[(t.line, t.program) for t in s.launches if t.program == "torch.distributed.launch"],
                        *s.set_to("NCCL_ASYNC_ERROR_HANDLING", ".*")],
    "KS416": lambda s: [(t.line, "") for t in s.trainings if t.srun is not None and t.program not in ELASTIC
                        and "kill-on-bad-exit" not in t.srun and not (s.tasks_per_node(t) == 1 and
                        "1" in (t.srun.get("ntasks"), t.srun.get("nodes", str(s.nodes))))],
    "KS501": _lost_exit_code,
    "KS502": lambda s: [(t.line, t.program) for t in s.trainings if t.command.end in ("|", "|&") and not s.pipefail],
    "KS503": lambda s: _in_background(s, False),
    "KS503b": lambda s: _in_background(s, True),
    "KS504": _unchecked_steps,
    "KS505": lambda s: _when(s.main and not s.resumes and (s.has("requeue") or s.hours >= 12), s.at("requeue", "time"),
                             "The job is requeued when a node fails" if s.has("requeue")
                             else f"The job may run {s.hours:g} hours"),
    "KS506": _signal_mismatch,
    "KS507": lambda s: _when(s.has_gpus and re.search(r"(^|:)(SIG)?(USR1|10)\b", s.value("signal").upper()),
                             s.at("signal"), s.value("signal")),
    "KS508": lambda s: [(t.line, w) for t in s.steps if t.texts[:2] == ["scontrol", "requeue"] and s.has("array")
                        for w in t.texts if re.fullmatch(SIGN + r"SLURM_JOB_?ID\}?", w)],
    "KS509": lambda s: [(t.line, "This") for t in s.steps if "scontrol" in t.command.text
                        and ((t.wrappers | {t.program}) & CONTAINERS or "container-image" in (t.srun or {}))],
    "KS601": _secret,
    "KS602": _secret_in_argv,
    "KS603": _traced_secret,
    "KS604": lambda s: [(n, text) for n, text in s.set_to("NCCL_((IB|P2P|SHM)_DISABLE|SOCKET_IFNAME)", r"\w[\w,]*")
                        if "_DISABLE=0" not in text and text not in s.own],
    "KS605": lambda s: s.set_to("CUDA_LAUNCH_BLOCKING", "1"),
    "KS606": lambda s: _running(s, INSTALL),
    "KS607": lambda s: [(t.line, "") for t in s.launches if "OMP_NUM_THREADS" not in s.variables
                        and t.program != "accelerate" and t.get("nproc_per_node") not in ("", "1")],
    "KS609": lambda s: [(t.line, "") for t in [s.main] if t and "PYTHONUNBUFFERED" not in s.variables
                        and "unbuffered" not in (t.srun or {}) and "-u" not in t.texts],
    "KS610": lambda s: [(n, m[1]) for n, row in enumerate(s.rows, 1)
                        if (m := re.search(r">\s*([./]*[\w.-]*host_?file[\w.]*)(?=\s|$)", row))],
}
