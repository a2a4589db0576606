"""What is wrong with an sbatch script: rules over its directives, commands and launches, and fixes for the safe ones.

A rule yields (line, detail); its docstring is the message, with {} for the detail, and says what happens and why.
Sources: sbatch(1) and srun(1) of 22.05, what that sbatch accepts, torch.distributed.run, bash(1).
"""

import difflib
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kit.cluster import Cluster
from kit.errors import InputError
from kit.script import ELASTIC, Script, Step
from kit.shell import LATE, SBATCH, Token, base, number

Hits = Iterable[tuple[int, str]]

NAMES = {name.rstrip("=?") for name in re.sub(r"\b\w\|", "", SBATCH).split()}
TEMPLATES = (".j2", ".jinja", ".jinja2", ".template", ".tmpl", ".tpl", ".in", ".mustache")
PLACEHOLDER = re.compile(r"<[^<>]+>|(?<!\$)\{[\w ]+\}|\{\{.*\}\}|change_?me|\byour[-_. ]|\bTODO\b|=\[\w+\]$", re.I)
REMOTE = {"ssh", "mpirun", "mpiexec", "pdsh", "clush"}
BUILTINS = re.compile(r"export|declare|local|readonly|echo|printf|read|test|\[\[?|:|for|case")
SECRET_NAME = re.compile(r"(?:^|_)(?:TOKEN|API_?KEY|ACCESS_KEY|SECRET(?:_KEY)?|PASSWORD|PASSWD)$")
SECRET = re.compile(r"\b(?:hf_\w{30,}|gh[pousr]_\w{36}|sk-[\w-]{32,}|AKIA[0-9A-Z]{16}|glpat-[\w-]{20})\b")
SETUP = re.compile(r"activate|conda|bashrc|profile|modules?\b|/etc/|\.?env(\.sh)?$")  # sourced files that hold no traps
INSTALL = re.compile(
    r"(\S*python[\d.]* -m )?(uv )?pip3? install|(conda|mamba|micromamba) (env )?(install|create|update)"
    r"|git (clone|pull)|(sudo )?apt(-get)? (-y )?install"
)
DEAD = re.compile(r"([ \t]*)(#?)([ \t]*)(\w{5,7})(?=[ \t]+--?\w)")
DASH, SPACE = r"(?:[\u2010-\u2015\u2212]|â€[\"”“])", r"[\u00a0\u2000-\u200b\u202f\u3000\ufeff]"
COUNT, SIZE, TIME = r"0*[1-9]\d*", r"\d+([KMGT]B?)?", r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|-1|INFINITE|UNLIMITED"
FORMS = {  # what sbatch 22.05 takes, and what later ones do
    **dict.fromkeys(("time", "time-min"), (TIME, "minutes, H:M:S or D-H")),
    **dict.fromkeys(("mem", "mem-per-cpu", "mem-per-gpu", "tmp"), (SIZE, "a whole number with K, M, G or T")),
    **dict.fromkeys(("ntasks", "cpus-per-task", "cpus-per-gpu", "ntasks-per-node"), (COUNT, "a whole number")),
    "nodes": (r"\d+[KM]?([-,:]\d+[KM]?)*", "a whole number or a range"),
    "signal": (r"([RB]{1,2}:)?(SIG)?(\d+|HUP|INT|QUIT|ABRT|KILL|ALRM|TERM|USR[12]|URG|CONT|STOP|TSTP|TTIN|TTOU)(@\d+)?",
               "a name as in B:USR2@120"),
    "open-mode": (r"a(ppend)?|t(runcate)?", "append or truncate"),
    "exclusive": (r"(user|mcs|topo)?", "empty, user or mcs"),
    "gres": (r"(?!gpus\b|\d|gpu=).*", "as in gpu:8"),
}  # fmt: skip
# Variables that Slurm sets or reads, without their SLURM_. Source: sbatch(1) and srun(1) of 22.05, and later ones.
SLURM = """ACCOUNT ACCTG_FREQ ARRAY_JOB_ID ARRAY_TASK_COUNT ARRAY_TASK_ID ARRAY_TASK_MAX ARRAY_TASK_MIN
ARRAY_TASK_STEP BCAST BCAST_EXCLUDE BURST_BUFFER CLUSTERS CLUSTER_NAME COMPRESS CONF CONSTRAINT CONTAINER CORE_SPEC
CPUS_ON_NODE CPUS_PER_GPU CPUS_PER_TASK CPU_BIND CPU_BIND_LIST CPU_BIND_TYPE CPU_BIND_VERBOSE CPU_FREQ_REQ DEBUG
DEBUG_FLAGS DELAY_BOOT DEPENDENCY DISABLE_STATUS DISTRIBUTION DIST_PLANESIZE EPILOG EXACT EXCLUSIVE EXIT_ERROR
EXIT_IMMEDIATE EXPORT_ENV GPUS GPUS_ON_NODE GPUS_PER_NODE GPUS_PER_SOCKET GPUS_PER_TASK GPU_BIND GPU_FREQ GRES
GRES_FLAGS GTIDS HET_SIZE HINT HOSTFILE IMMEDIATE JOBID JOB_ACCOUNT JOB_COMMENT JOB_CPUS_PER_NODE JOB_DEPENDENCY
JOB_END_TIME JOB_EXIT_CODE JOB_GID JOB_GPUS JOB_GROUP JOB_ID JOB_LICENSES JOB_NAME JOB_NODELIST JOB_NODES
JOB_NUM_NODES JOB_PARTITION JOB_QOS JOB_RESERVATION JOB_SEGMENT_SIZE JOB_START_TIME JOB_UID JOB_USER KILL_BAD_EXIT
LABELIO LAUNCH_NODE_IPADDR LOCALID MEM_BIND MEM_BIND_LIST MEM_BIND_PREFER MEM_BIND_SORT MEM_BIND_TYPE MEM_BIND_VERBOSE
MEM_PER_CPU MEM_PER_GPU MEM_PER_NODE MPI_TYPE NETWORK NNODES NODEID NODELIST NODE_ALIASES NO_KILL NPROCS NTASKS
NTASKS_PER_CORE NTASKS_PER_GPU NTASKS_PER_NODE NTASKS_PER_SOCKET OOM_KILL_STEP OPEN_MODE OVERCOMMIT OVERLAP PARTITION
PMI_KVS_NO_DUP_KEYS POWER PRIO_PROCESS PROCID PROFILE PROLOG QOS REMOTE_CWD REQ_SWITCH RESERVATION RESTART_COUNT
RESV_PORTS SEND_LIBS SHARDS_ON_NODE SIGNAL SPREAD_JOB SRUN_COMM_HOST SRUN_COMM_PORT SRUN_REDUCE_TASK_EXIT_MSG
STDERRMODE STDINMODE STDOUTMODE STEPID STEP_GPUS STEP_GRES STEP_ID STEP_KILLED_MSG_NODE_ID STEP_LAUNCHER_PORT
STEP_NODELIST STEP_NUM_NODES STEP_NUM_TASKS STEP_TASKS_PER_NODE SUBMIT_DIR SUBMIT_HOST TASKS_PER_NODE TASK_EPILOG
TASK_PID TASK_PROLOG TEST_EXEC THREADS THREADS_PER_CORE THREAD_SPEC TIMELIMIT TOPOL TOPOLOGY_ADDR
TOPOLOGY_ADDR_PATTERN TRES_PER_TASK UMASK UNBUFFEREDIO USE_MIN_NODES WAIT WAIT4SWITCH WCKEY WORKING_DIR"""


@dataclass(frozen=True)
class Finding:
    """One fault: where it is, what happens because of it, and what to write instead. severity: error, warning, info."""

    file: str
    rule: str
    severity: str
    line: int
    message: str
    fix: str


@dataclass(frozen=True)
class Rule:
    """How one kind of fault is found, and what its findings say."""

    id: str
    severity: str
    fix: str
    find: Callable[[Script], Hits]


RULES: list[Rule] = []


def rule(id: str, severity: str, fix: str) -> Callable[[Callable[[Script], Hits]], Callable[[Script], Hits]]:
    """Registers a rule under its id; two functions may share one id at two severities."""

    def register(find: Callable[[Script], Hits]) -> Callable[[Script], Hits]:
        RULES.append(Rule(id, severity, fix, find))
        return find

    return register


# What sbatch reads


@rule("KS101", "error", "Write an ASCII - or --, a plain space and plain quotes.")
def _unicode_dash(script: Script) -> Hits:
    """{} has a dash, space or quote outside ASCII: sbatch refuses it, and a program takes it for an operand."""
    for line, words in script.directives:
        yield from ((line, w) for w in words if re.match(DASH, w) or re.search(rf"{SPACE}|[\u201c-\u201f]", w))
    for command in script.commands:
        if command.words[0].text not in ("echo", "printf"):
            yield from (
                (w.line, w.text) for w in command.words if not w.quoted and re.match(rf"{DASH}-?[A-Za-z]", w.text)
            )


@rule("KS102", "error", "Move it above the first command.")
def _late_directive(script: Script) -> Hits:
    """{} stands after the first command, where sbatch no longer reads directives, so it is silently ignored."""
    if not re.match(r"\s*\{%", script.rows[script.body - 1]):
        late = [
            t for t in script.tokens if t.kind == "comment" and t.line > script.body and t.text.startswith("#SBATCH")
        ]
        yield from ((t.line, t.text.strip()) for t in late if script.rows[t.line - 1].startswith("#SBATCH"))


@rule("KS103", "warning", "Start the line with #SBATCH, or with ##SBATCH to switch it off visibly.")
def _dead_directive(script: Script) -> Hits:
    """{} is not #SBATCH at the start of a line, so sbatch ignores it without a word."""
    for line, row in enumerate(script.rows[: script.body], 1):
        match = None if row.startswith("#SBATCH") else DEAD.match(row)
        if match and difflib.SequenceMatcher(None, match[4].upper(), "SBATCH").ratio() >= 0.8:
            yield line, row.strip()


@rule("KS104", "error", "Put #!/bin/bash first, before any blank line, licence or byte order mark.")
def _shebang_first(script: Script) -> Hits:
    """The script does not begin with #!, so sbatch says it does not look like a batch script."""
    return [] if script.text.startswith("#!") else [(1, "")]


@rule("KS105", "error", "Save it with Unix line ends (kit lint --fix does).")
def _crlf(script: Script) -> Hits:
    """Lines end in CR LF, and sbatch refuses a script with DOS line breaks."""
    return [(script.raw[: script.raw.index("\r\n")].count("\n") + 1, "")] if "\r\n" in script.raw else []


@rule("KS106", "error", "Write it out, use %u %x %j, or give it on sbatch's command line.")
def _shell_in_directive(script: Script) -> Hits:
    """{} is taken literally: no shell reads directives, so variables and ~ are not expanded."""
    plain = [o for o in script.options if o.name not in ("comment", "wrap")]
    return [(o.line, o.value) for o in plain if re.search(r"\$[\w({]|`", o.value) or o.value.startswith("~")]


def _unfilled(script: Script) -> Iterator[tuple[int, str]]:
    """Directives that still hold a template's placeholder."""
    for line, words in script.directives:
        match = PLACEHOLDER.search(" ".join(words))
        if match and not any(w.startswith("--comment") for w in words):
            yield line, match[0]


@rule("KS107", "error", "Fill it in.")
def _placeholder(script: Script) -> Hits:
    """{} is a placeholder that nobody filled in."""
    return [] if script.file.endswith(TEMPLATES) else _unfilled(script)


@rule("KS108", "error", "Correct the option; sbatch --help lists them.")
def _bad_option(script: Script) -> Hits:
    """{}: the job is refused, or asks for something else than meant."""
    skip = {line for find in (_unicode_dash, _unfilled, _shell_in_directive) for line, _ in find(script)}
    yield from ((line, f"{word} is no option") for line, word in script.operands if line not in skip)
    for o in script.options:
        form, hint = FORMS.get(o.name, (".*", ""))
        if o.line not in skip and o.problem:
            near = difflib.get_close_matches(o.name.replace("_", "-"), NAMES, 1, 0.8)
            if "not recognized" not in o.problem or near or not o.value.startswith("--"):
                yield o.line, o.problem + (f", did you mean --{near[0]}" if near else "")
        elif (o.line not in skip and not re.fullmatch(form, o.value, re.I)) or o.value.startswith("="):
            yield o.line, f"--{o.name} cannot be {o.value!r}" + (f", it is {hint}" if hint else "")
    for line, words in script.directives:
        dashed = [w for w in words if re.match(r"-\w[\w-]+", w) and w[1:].partition("=")[0] in NAMES]
        yield from ((line, f"{w} is read as -{w[1]} with the value {w[2:]!r}") for w in dashed)


@rule("KS108", "warning", "Check sbatch --help on the cluster, or name the option under slurm.options in its profile.")
def _foreign_option(script: Script) -> Hits:
    """{} is no option of Slurm's own sbatch: it works only where a site's plug-in adds it."""
    known = {line for line, _ in _bad_option(script)}
    return [(o.line, o.value) for o in script.options if o.problem and o.line not in known and o.value.isascii()]


@rule("KS109", "error", "Keep one of them.")
def _exclusive_options(script: Script) -> Hits:
    """{} exclude each other, and sbatch refuses the script."""
    for group in (("mem", "mem-per-cpu", "mem-per-gpu"), ("cpus-per-gpu", "cpus-per-task")):
        if len(both := [name for name in group if name in script.asked]) > 1 and not script.het:
            yield max(script.asked[name].line for name in both), " and ".join(f"--{name}" for name in both)


@rule("KS110", "warning", "Delete one.")
def _duplicate(script: Script) -> Hits:
    """--{} is given twice with different values, and only the last one counts."""
    for name, last in ({} if script.het else script.asked).items():
        if name != "mail-type" and any(o.name == name and o.value != last.value for o in script.options):
            yield last.line, name


@rule("KS111", "error", "Correct the syntax; bash -n SCRIPT shows it too.")
def _bash_syntax(script: Script) -> Hits:
    """Bash cannot read this: {}."""
    bash = shutil.which("bash")
    if bash and re.match(r"#!.*\b(ba)?sh\b", script.rows[0]) and not script.file.endswith(TEMPLATES):
        done = subprocess.run([bash, "-n"], input=script.text.encode(errors="surrogateescape"), capture_output=True)
        if done.returncode and (match := re.search(r"line (\d+): (.*)", done.stderr.decode(errors="replace"))):
            yield int(match[1]), match[2]


# Logs


def _log_folders(script: Script) -> Iterator[tuple[int, str, bool]]:
    """Folders of --output and --error that are absent here, and whether they must be absent when the job starts too."""
    here = [Path(script.value("chdir") or "."), Path(script.file).parent]
    made = {base(t.rstrip("/")) for s in script.steps if s.program == "mkdir" for t in s.texts}
    for name in script.asked.keys() & {"output", "error"}:
        folder = Path(script.value(name)).parent
        if not any((base / folder).is_dir() for base in here) and not re.search(r"[$<{%~]", str(folder)):
            seen = Path(*folder.parts[:2]).is_dir() if folder.is_absolute() else Path(script.file).is_file()
            yield script.asked[name].line, str(folder), seen or folder.name in made


@rule("KS201", "error", "Create it before sbatch; mkdir in the script is too late.")
def _log_folder_absent(script: Script) -> Hits:
    """The folder {} does not exist: Slurm opens the log before the script runs, so the job fails and leaves no log."""
    return [(line, folder) for line, folder, sure in _log_folders(script) if sure]


@rule("KS201", "warning", "Create it before sbatch; mkdir in the script is too late.")
def _log_folder_unseen(script: Script) -> Hits:
    """The folder {} is not seen from here: if it is absent when the job starts, the job fails and leaves no log."""
    return [(line, folder) for line, folder, sure in _log_folders(script) if not sure]


@rule("KS202", "warning", "Put %j in the name, or %A_%a for an array.")
def _log_overwritten(script: Script) -> Hits:
    """The log {} has the same name for every run and array task, so each overwrites the one before."""
    pattern = r"%\d*[jJa]" if script.has("array") else r"%\d*[jJA]"
    for name in ("output", "error"):
        value = script.value(name)
        if (
            value not in ("", "/dev/null")
            and not re.search(pattern, value)
            and not script.value("open-mode").startswith("a")
        ):
            yield script.asked[name].line, value


@rule("KS203", "warning", "Add #SBATCH --open-mode=append.")
def _requeue_truncates(script: Script) -> Hits:
    """After a requeue the restarted job truncates its log, and the trace of why it stopped is lost."""
    return [(script.asked["requeue"].line, "")] if script.has("requeue") and not script.has("open-mode") else []


# What the job asks for


@rule("KS301", "warning", "Set --time to what the run needs; above a day, make it resume.")
def _no_time(script: Script) -> Hits:
    """{}."""
    if not script.has("time"):
        yield 1, "There is no --time, so the partition's default decides and backfill cannot place the job early"
    elif script.hours > 24 and not script.resumes:
        yield (
            script.asked["time"].line,
            f"{script.value('time')} is more than a day, waits long in the queue, and nothing resumes",
        )


@rule("KS302", "error", "Derive it: $SLURM_GPUS_ON_NODE, $SLURM_NNODES.")
def _more_than_allocated(script: Script) -> Hits:
    """The launcher is told {}: ranks without a GPU fail, missing nodes are waited for until a time-out."""
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


@rule("KS303", "error", "Use --ntasks-per-node=1 with torchrun or accelerate, or srun python without them.")
def _double_launch(script: Script) -> Hits:
    """srun starts {} launchers on a node and each starts its own ranks: too many for the GPUs, on the same port."""
    for step in script.launches:
        ranks = step.get("nproc_per_node", "num_processes") or ("auto" if step.program == "accelerate" else "1")
        if step.srun is not None and ranks != "1" and (script.tasks_per_node(step) or 1) > 1:
            yield step.line, str(script.tasks_per_node(step))


@rule("KS304", "error", "Start it with srun --ntasks-per-node=1.")
def _not_under_srun(script: Script) -> Hits:
    """{} runs on the first node only: the others idle, or are waited for until the rendezvous times out."""
    again = any(s.srun is not None and re.search(r"\$0|BASH_SOURCE", " ".join(s.texts)) for s in script.steps)
    for step in script.launches:
        alone = step.get("nnodes", "num_machines") == "1" or "standalone" in step.options or step.wrappers & REMOTE
        if (
            (script.nodes or 1) > 1
            and step.srun is None
            and not alone
            and not again
            and "function" not in step.command.inside
        ):
            yield step.line, step.program


@rule("KS305", "warning", "Add --nodes.")
def _ntasks_without_nodes(script: Script) -> Hits:
    """{} tasks without --nodes may land on any number of nodes, and --gres counts per node."""
    tasks = number(script.value("ntasks")) or 1
    if tasks > 1 and not script.has("nodes", "nodelist", "ntasks-per-node") and (script.has_gpus or script.launches):
        yield script.asked["ntasks"].line, str(tasks)


@rule("KS308", "warning", "Delete it: Slurm sets it for the GPUs that the job has.")
def _pinned_gpus(script: Script) -> Hits:
    """{} picks GPUs by hand, and where Slurm does not confine the job it takes those of other users."""
    values = {t.text for t in script.assigned if t.kind == "CUDA_VISIBLE_DEVICES"}
    return script.set_to("CUDA_VISIBLE_DEVICES", r"[\d,]+") if len(values) == 1 and not script.has("exclusive") else []


@rule("KS309", "warning", "Add --cpus-per-task: data loader workers and one more for each GPU.")
def _no_cpus(script: Script) -> Hits:
    """The job asks for GPUs but not for CPUs; the usual default is one a task, and the data loaders starve."""
    if script.has_gpus and not script.has("cpus-per-task", "cpus-per-gpu", "exclusive", "mincpus"):
        yield next(o.line for o in script.options if "gpu" in o.name + o.value), ""


# Ranks and rendezvous


def _early_ranks(script: Script) -> Iterator[tuple[int, str, bool]]:
    """Node ranks that the batch shell expands, and whether a c10d or etcd rendezvous sets them right again."""
    for step in script.launches:
        for rank in (step.options[n] for n in ("node_rank", "machine_rank") if n in step.options):
            if script.nodes != 1 and re.search(r"\$\{?SLURM_(PROCID|NODEID|LOCALID)", rank.text):
                yield rank.line, rank.text, step.get("rdzv_backend") in ("c10d", "etcd", "etcd-v2")


@rule("KS401", "error", "Let each node expand it: srun bash -c '... --node_rank $SLURM_NODEID'.")
def _early_rank(script: Script) -> Hits:
    """{} is expanded once, by the batch shell, where it is 0: every node claims to be the first."""
    return [(line, text) for line, text, saved in _early_ranks(script) if not saved]


@rule("KS401", "warning", "Leave the rank out, or let each node expand it.")
def _early_rank_ignored(script: Script) -> Hits:
    """{} is 0 on every node, since the batch shell expands it; only the dynamic rendezvous, which ignores it, helps."""
    return [(line, text) for line, text, saved in _early_ranks(script) if saved]


@rule("KS403", "error", 'Use the first name of scontrol show hostnames "$SLURM_JOB_NODELIST".')
def _nodelist_endpoint(script: Script) -> Hits:
    """{} is a compressed list such as node[1-4], not the name of a host that can be connected to."""
    for t in script.given("MASTER_ADDR", "rdzv_endpoint", "master_addr", "main_process_ip"):
        if script.nodes != 1 and re.fullmatch(r"[$\ue000]\{?SLURM_(JOB_)?NODELIST\}?(:.*)?", t.text):
            yield t.line, t.text


@rule("KS404", "error", "Use the head node's address, found in the batch shell, on every node.")
def _localhost(script: Script) -> Hits:
    """{} is another machine on each node, so every node waits for itself or trains alone."""
    for t in script.given("MASTER_ADDR", "rdzv_endpoint", "master_addr", "main_process_ip"):
        local = r"(localhost|127\.0\.0\.\d+)(:.*)?|\ue000\(hostname\b.*|.*\|\|\s*echo ['\"]?(localhost|127\.).*"
        if (script.nodes or 1) > 1 and re.fullmatch(local, t.text, re.DOTALL):
            yield t.line, t.text


@rule("KS406", "warning", "Use --standalone on one node, else $((20000 + SLURM_JOB_ID % 12000)).")
def _fixed_port(script: Script) -> Hits:
    """Port {} is the same for every job, so two jobs on a node, or one and a leftover process, collide."""
    return [] if script.has("exclusive") else [(n, p) for p, n in script.ports.items() if p.isdecimal() and int(p)]


@rule("KS407", "error", "Use $((20000 + SLURM_JOB_ID % 12000)), expanded in the batch shell.")
def _bad_random_port(script: Script) -> Hits:
    """{} may fall below 1024, which only root may use, or differs from node to node."""
    for port, line in script.ports.items():
        low = re.search(r"shuf\s+-i\s*(\d+)-", port)
        bare = re.fullmatch(r"[$\ue000](\{?RANDOM\}?|\(\(\s*\$?RANDOM\s*\)\))", port)
        apart = script.nodes != 1 and re.search(r"\ue000(\{?RANDOM|\(.*(RANDOM|shuf))", port)
        if (low and int(low[1]) < 1024) or bare or apart:
            yield line, port


@rule("KS408", "warning", "Use --rdzv_id=$SLURM_JOB_ID.")
def _constant_rdzv_id(script: Script) -> Hits:
    """The rendezvous id {} is the same for every job, so two jobs that meet at one endpoint join each other."""
    return [(t.line, t.text) for t in script.given("", "rdzv_id") if re.fullmatch(r"\w+", t.text)]


@rule("KS409", "error", "Write srun env NAME=value program, or set it before srun.")
def _srun_assignment(script: Script) -> Hits:
    """srun looks for a program called {}: it is no shell and sets no variables."""
    found = [s for s in script.steps if s.srun is not None and re.match(r"\w+=", s.texts[0])]
    return [(s.line, s.texts[0].partition("=")[0] + "=...") for s in found]


@rule("KS411", "error", "Correct the name.")
def _misspelt_variable(script: Script) -> Hits:
    """{}, so it is empty."""
    known = {f"SLURM_{name}" for name in SLURM.split()} | {t.kind for t in script.assigned}
    for token in (t for t in script.tokens if t.kind == "word"):
        for name in re.findall(r"[$\ue000]\{?(SLURM_\w+)", token.text):
            near = (
                [] if name in known or "HET_GROUP" in name else difflib.get_close_matches(name, sorted(known), 1, 0.9)
            )
            yield from ((token.line, f"Slurm sets no {name}, but {n}") for n in near)


@rule("KS413", "error", "Drop --standalone and give --rdzv_backend=c10d and an endpoint on the head node.")
def _standalone(script: Script) -> Hits:
    """--standalone makes a world of each node, so {} nodes train apart."""
    for step in (s for s in script.launches if "standalone" in s.options):
        nodes = (step.srun or {}).get("nodes") or (str(script.nodes or 1) if step.srun is not None else "1")
        if (wanted := max(number(step.get("nnodes")) or 1, number(nodes) or 1)) > 1:
            yield step.line, str(wanted)


@rule("KS413", "warning", "Drop one of the two.")
def _standalone_ignores(script: Script) -> Hits:
    """--standalone ignores {}."""
    for step in (s for s in script.launches if "standalone" in s.options):
        yield from ((step.line, f"--{n}") for n in ("master_port", "rdzv_endpoint") if n in step.options)


@rule("KS415", "info", "Use torchrun, and TORCH_NCCL_ASYNC_ERROR_HANDLING.")
def _deprecated(script: Script) -> Hits:
    """{} is deprecated in PyTorch."""
    yield from ((s.line, s.program) for s in script.launches if s.program == "torch.distributed.launch")
    yield from script.set_to("NCCL_ASYNC_ERROR_HANDLING", ".*")


@rule("KS416", "info", "Write srun --kill-on-bad-exit=1.")
def _no_kill_on_bad_exit(script: Script) -> Hits:
    """When one task dies, srun leaves its peers waiting for it until the time limit."""
    for step in (s for s in script.steps if s.trains and s.srun is not None and s.program not in ELASTIC):
        srun = step.srun or {}
        one = "1" in (srun.get("ntasks"), srun.get("nodes", str(script.nodes))) and script.tasks_per_node(step) == 1
        if not one and "kill-on-bad-exit" not in srun:
            yield step.line, ""


# How the job ends


@rule("KS501", "error", "Use set -euo pipefail, or rc=$? after it and exit $rc at the end.")
def _lost_exit_code(script: Script) -> Hits:
    """The script goes on after {} and ends with the last command's exit code, so a crash shows as COMPLETED."""
    after = script.commands[script.main.index + 1 :] if script.main else []
    text = " ".join(w.text for c in after for w in c.words)
    checked = re.search(r"\$\?|\bexit [1-9$]", text) or script.errexit or any("ERR" in s.texts for s in script.steps)
    last = after[-1].words[0].text if after else "wait"
    if script.main and last != "wait" and not checked and script.main.command.end in ("\n", ";"):
        yield script.main.line, script.main.program


@rule("KS502", "error", "Add set -o pipefail.")
def _tee(script: Script) -> Hits:
    """A pipeline ends with the exit code of its last command, so a crash of {} shows as COMPLETED."""
    piped = [s for s in script.steps if s.trains and s.command.end in ("|", "|&")]
    return [] if script.pipefail else [(s.line, s.program) for s in piped]


def _in_background(script: Script) -> Iterator[tuple[Step, list[list[str]]]]:
    """Training steps in the background with none in front after them, and the wait commands that follow."""
    for step in (s for s in script.steps if s.trains and s.command.end == "&"):
        later = [s for s in script.steps if s.index > step.index]
        if not any(s.trains and s.command.end != "&" for s in later):
            yield step, [s.texts for s in later if s.program == "wait"]


@rule("KS503", "error", "Add pid=$! after it and wait $pid at the end.")
def _background(script: Script) -> Hits:
    """{} runs in the background and nothing waits for it: the job ends at once and kills it."""
    return [(step.line, step.program) for step, waits in _in_background(script) if not waits]


@rule("KS503", "warning", "Keep each pid=$! and use wait $pid.")
def _bare_wait(script: Script) -> Hits:
    """A bare wait always returns 0, so a crash of {} shows as COMPLETED."""
    return [
        (step.line, step.program) for step, waits in _in_background(script) if waits and all(len(w) == 1 for w in waits)
    ]


@rule("KS505", "warning", "Save checkpoints, resume from the last, and use --signal with --requeue.")
def _no_resume(script: Script) -> Hits:
    """{}, and nothing in the script resumes: an interruption loses everything."""
    if script.main and script.has("requeue") and not script.resumes:
        yield script.asked["requeue"].line, "The job is requeued when a node fails"
    elif script.main and script.hours >= 12 and not script.resumes:
        yield script.asked["time"].line, f"The job may run {script.hours:g} hours"


@rule("KS506", "error", "Use B: with a trap and srun ... & wait, or no B: and a handler in the program.")
def _signal(script: Script) -> Hits:
    """The warning signal does not do its work: {}."""
    match = re.match(r"(?:([RB]+):)?(?:SIG)?(\w+)", script.value("signal").upper())
    if not match:
        return
    name, line = {"10": "USR1", "12": "USR2", "15": "TERM"}.get(match[2], match[2]), script.asked["signal"].line
    traps = [
        s.texts for s in script.steps if s.program == "trap" and name in (t.removeprefix("SIG") for t in s.texts[2:])
    ]
    sourced = any(s.program in ("source", ".") and not SETUP.search(s.texts[-1]) for s in script.steps)
    step = script.main
    if any("exec" in s.wrappers for s in script.steps):
        return
    if "B" in (match[1] or "") and not traps and not sourced:
        yield line, f"B: sends {name} to the batch shell, which has no trap for it and dies, and the steps with it"
    elif "B" in (match[1] or "") and traps and step and step.command.end != "&":
        yield line, f"bash runs its trap for {name} only after {step.program}, which is in the foreground, has ended"
    elif "B" not in (match[1] or "") and any(t[1] for t in traps):
        yield line, f"without B: only the steps get {name}, and the script's trap never runs"


@rule("KS508", "error", 'Requeue "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}".')
def _requeue_array(script: Script) -> Hits:
    """In the task whose job id is the array's own, {} requeues the whole array."""
    for step in script.steps:
        if step.texts[:2] == ["scontrol", "requeue"] and script.has("array"):
            yield from ((step.line, t) for t in step.texts if re.fullmatch(r"[$\ue000]\{?SLURM_JOB_?ID\}?", t))


# Secrets and habits


@rule("KS601", "error", "Revoke it, and read the new one in the job from a file with mode 600.")
def _secret(script: Script) -> Hits:
    """{} holds a secret, and Slurm keeps a copy of every script."""
    for token in [*script.tokens, *(Token("word", " ".join(w), n) for n, w in script.directives)]:
        for match in SECRET.finditer(token.text):
            if len(set(match[0])) > 10:  # not hf_xxxxxxxx
                yield token.line + token.text[: match.start()].count("\n"), "This line"
    for t in script.assigned:
        if SECRET_NAME.search(t.kind) and re.fullmatch(r"[\w+/=-]{20,}", t.text) and len(set(t.text)) > 10:
            yield t.line, "This line"
    for s in script.steps:
        if s.texts[:2] == ["wandb", "login"] and re.fullmatch(r"[0-9a-f]{40}", s.texts[-1]):
            yield s.line, "This line"


@rule("KS602", "warning", "Let the program read it from the environment or a file with mode 600.")
def _secret_in_argv(script: Script) -> Hits:
    """{} puts a secret on a command line, where ps and scontrol show it to every user."""
    for line, words in script.directives:
        yield from ((line, "--export") for w in words if re.match(r"--export=", w) and _exports_secret(w))
    for step in (s for s in script.steps if not BUILTINS.fullmatch(s.program)):
        for word in (w.text for w in step.command.words):
            names = re.findall(r"[$\ue000]\{?(\w+)", word)
            if (any(map(SECRET_NAME.search, names)) and not re.match(r"\w+=", word)) or _exports_secret(word):
                yield step.line, re.sub(r"=(?![$\ue000]).*", "", word)


def _exports_secret(word: str) -> bool:
    return word.startswith("--export=") and any(map(SECRET_NAME.search, re.findall(r"(\w+)=", word)))


@rule("KS604", "info", "Keep it in the cluster's profile, not in the script.")
def _nccl_crutch(script: Script) -> Hits:
    """{} is right for one cluster and slow or broken on the next."""
    known = script.cluster.environment if script.cluster else {}
    found = [*script.set_to("NCCL_(IB|P2P|SHM)_DISABLE", "1"), *script.set_to("NCCL_SOCKET_IFNAME", r"\w[\w,]*")]
    return [(line, text) for line, text in found if text not in {f"{k}={v}" for k, v in known.items()}]


@rule("KS605", "warning", "Remove it.")
def _debug_left_on(script: Script) -> Hits:
    """{} makes every kernel launch wait, and training several times slower."""
    return script.set_to("CUDA_LAUNCH_BLOCKING", "1")


@rule("KS606", "warning", "Build the environment before, on the login node.")
def _install_in_job(script: Script) -> Hits:
    """{} in the job needs the internet on compute nodes, and nodes that install into one folder race."""
    for step in script.steps:
        if match := INSTALL.match(" ".join(step.texts)):
            yield step.line, match[0]


@rule("KS609", "info", "Add export PYTHONUNBUFFERED=1.")
def _buffered(script: Script) -> Hits:
    """Python holds back its output in blocks, so the log and whoever watches it lag behind."""
    set_here = any(t.kind == "PYTHONUNBUFFERED" for t in script.assigned)
    if script.main and not set_here and "unbuffered" not in (script.main.srun or {}) and "-u" not in script.main.texts:
        yield script.main.line, ""


def lint(text: str, file: str = "script", cluster: Cluster | str | None = None) -> list[Finding]:
    """All findings, by line. A cluster's own options and NCCL settings count as known."""
    script = Script(text, file, Cluster.load(cluster) if cluster else None)
    found = {
        Finding(file, r.id, r.severity, line, (r.find.__doc__ or "").replace("{}", detail.replace(LATE, "$")), r.fix)
        for r in RULES
        for line, detail in r.find(script)
    }
    return sorted(found, key=lambda f: (f.line, f.rule, f.message))


def lint_file(path: Path | str, cluster: Cluster | str | None = None) -> list[Finding]:
    """Findings of a file. Raises InputError where it cannot be read."""
    return lint(read_script(Path(path)), str(path), cluster)


def read_script(path: Path) -> str:
    """The text with every byte and line end kept. Raises InputError where it cannot be read."""
    try:
        return path.read_bytes().decode(errors="surrogateescape")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); give the path of a batch script.") from None


def fix(text: str) -> str:
    """The script with KS101, KS103, KS105, KS203, KS416 and KS609 mended; nothing else in it changes."""
    script = Script(text)
    for line, word in _unicode_dash(script):
        row = script.rows[line - 1]
        script.rows[line - 1] = _ascii(row) if row.startswith("#SBATCH") else row.replace(word, _ascii(word))
    for line, _ in _dead_directive(script):
        script.rows[line - 1] = DEAD.sub(lambda m: m[0] if m[3] else "#SBATCH", script.rows[line - 1])
    script = Script("\n".join(script.rows))
    for line, _ in _no_kill_on_bad_exit(script):
        row = script.rows[line - 1]
        script.rows[line - 1] = re.sub(r"\bsrun\b", "srun --kill-on-bad-exit=1", row) if row.count("srun") == 1 else row
    for _ in list(_buffered(script)):
        script.rows.insert(script.body - 1, "export PYTHONUNBUFFERED=1")
    for line, _ in _requeue_truncates(script):
        script.rows.insert(line, "#SBATCH --open-mode=append")
    return "\n".join(script.rows)


def _ascii(text: str) -> str:
    text = re.sub("[\u201c-\u201f]", '"', re.sub(SPACE, " ", text))
    return re.sub(rf"(?<![^\sH]){DASH}-?(?=(\w\w?))", lambda m: "--" if len(m[1]) > 1 else "-", text)
