"""What a launch would do: nodes, batch, data, forecast, start, job script and its lint findings. Submits nothing."""

import html
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.config import models
from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.data.dataset import find_prepared
from kit.errors import InputError
from kit.forecast.choices import Decision
from kit.forecast.timing import Prediction, predict
from kit.lint.lint import Finding, lint
from kit.lint.report import LintReport
from kit.show import Part, Result, Table, count
from kit.slurm import script as job_script
from kit.slurm.client import available, command, version
from kit.slurm.launch import check_settings, choose, compiler_here
from kit.slurm.linting import site_of
from kit.slurm.submit import advice, reach
from kit.trainers import trainer_of

LOG_FOLDER_RULE = "KS201"  # the folder of the log does not exist; the launch makes it
TIME_LIMIT_RULE = "KS301"  # the script has no time limit; on this machine no queue needs it
RENDEZVOUS = (
    "at the address that Slurm has for the head node, on a free port chosen by the job id; every node checks that it "
    "reaches the head before any rank starts"
)

SCRIPT_NAME = "job.sbatch"


@dataclass(frozen=True)
class Plan(Result):
    """What `launch` would do with a recipe and a cluster. `as_dict` is what `kit launch --dry-run --json` prints.

    facts: sentences by topic. verdict: whether it fits, by the forecast ("fits", "tight", "does not fit", "unknown").
    choices: what each "auto" of the recipe became. dataset: the prepared folder; None: it is prepared first. start:
    Slurm's estimate; None: unknown, or it starts at once on this machine. script: the job script, with findings of the
    linter.
    """

    facts: Mapping[str, str]
    verdict: str
    choices: tuple[Decision, ...]
    dataset: Path | None
    start: str | None
    findings: tuple[Finding, ...]
    script: str

    def parts(self) -> Iterable[Part]:
        """The facts, and the findings with their lines."""
        yield self._table()
        if self.findings:
            yield from LintReport({SCRIPT_NAME: self.script}, self.findings).parts()

    def _table(self) -> Table:
        rows = []
        for name, text in self.facts.items():
            first, *more = text.split("\n")
            rows += [(name, first), *(("", line) for line in more)]
        return Table(("", "plan"), rows)

    def __str__(self) -> str:
        """For pipes: the parts, then the job script."""
        return f"{super().__str__()}\n\n{self.script}"

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.syntax import Syntax

        return Group(super().__rich__(), Syntax(self.script, "bash", background_color="default", word_wrap=True))

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """As every result, with the job script to unfold."""
        script = f"<details><summary>the job script</summary><pre>{html.escape(self.script)}</pre></details>"
        bundle = super()._repr_mimebundle_()
        return bundle | {"text/html": f"{bundle['text/html']}\n{script}"}


@dataclass(frozen=True)
class Start:
    """When the job would start. time: Slurm's estimate, where it has one. local: on this machine, without Slurm."""

    text: str
    time: str | None = None
    local: bool = False


def plan(recipe: Recipe, cluster: Cluster, prepared: Path = Path("prepared")) -> Plan:
    """What `launch` would do with these; weights or a Slurm that are missing are facts of the plan.

    Raises InputError for settings that cannot run.
    """
    shape = check_settings(recipe, cluster, compiler_here(cluster))
    dataset = find_prepared(recipe, prepared, cluster)
    predicted, unknown = None, ""
    chosen = choose(recipe, cluster, dataset.manifest if dataset else None, shape)
    recipe = chosen.recipe
    try:
        predicted = predict(recipe, cluster, dataset.manifest if dataset else None, shape)
    except InputError as error:  # a model that the forecast does not know may still train
        unknown = str(error)
    folder = Path(cluster.paths.runs).absolute() / f"{recipe.name}-{time.strftime('%Y%m%d-%H%M')}"
    data, seconds = dataset.path if dataset else prepared.absolute(), job_script.warning_s(recipe, cluster, predicted)
    script = job_script.render(job_script.Job(recipe, cluster, folder, data, "drawn-at-launch", seconds))
    findings = lint(script, SCRIPT_NAME, site_of(cluster, version()))
    start = _start(cluster, recipe.parallel.nodes, script)
    ignored = {LOG_FOLDER_RULE} | ({TIME_LIMIT_RULE} if start.local else set())
    findings = [found for found in findings if found.rule not in ignored]
    facts = {
        "recipe": f"{recipe.name}: {recipe.tuning.method} of {recipe.model.name}",
        "nodes": _nodes(recipe, cluster),
        "batch": _batch(recipe),
        **trainer_facts(recipe, cluster),
        "data": f"prepared in {dataset.path}" if dataset else f"{recipe.data.source} is prepared first, here",
        "weights": _problem(models.check_weights, recipe.model.name, cluster.paths.hf_home) or "found",
        "choices": "\n".join(map(str, chosen.decisions)) or "the recipe leaves none open",
        "forecast": _sentences(predicted) if predicted else unknown,
        "rendezvous": RENDEZVOUS,
        "run folder": f"{folder}, {_free_gb(folder):,.0f} GB free there",
        "starts": start.text,
        "linter": f"{count(len(findings), 'finding')}, with the lines below" if findings else "no findings",
    }
    verdict = predicted.memory.verdict if predicted else "unknown"
    found = tuple(findings)
    return Plan(facts, verdict, chosen.decisions, dataset.path if dataset else None, start.time, found, script)


def trainer_facts(recipe: Recipe, cluster: Cluster) -> dict[str, str]:
    """Where another trainer runs, and what it does otherwise than the recipe says; empty for the kit's own."""
    if not recipe.trainer.is_other:
        return {}
    rendering = trainer_of(recipe).render(recipe, cluster, Path("run"))
    lines = [
        f"{recipe.trainer.name} in {recipe.trainer.python or 'no environment: set trainer.python'}",
        *rendering.notes,
    ]
    return {"trainer": "\n".join(lines)}


def _start(cluster: Cluster, nodes: int, script: str) -> Start:
    """When the script would start, or why it cannot be submitted from here."""
    unreachable = _problem(reach, cluster, nodes)
    return Start(unreachable) if unreachable else estimate_start(script)


def _problem(check: Callable[..., object], *arguments: Any) -> str:
    """The message of what a check raises, or an empty string."""
    try:
        check(*arguments)
    except InputError as error:
        return str(error)
    return ""


def _nodes(recipe: Recipe, cluster: Cluster) -> str:
    parallel, profile = recipe.parallel, cluster.slurm
    each = count(parallel.gpus_per_node, "GPU" if cluster.nodes.gpus else "CPU rank")
    where = f", partition {profile.partition}" if profile.partition else ""
    limit = f", at most {profile.time}" if profile.time else ", without a time limit in the profile"
    ranks = f"{count(parallel.nodes, 'node')} x {each} = {count(recipe.world_size, 'rank')}"
    layers = f", each layer split over {parallel.tensor} ranks" if parallel.tensor > 1 else ""
    experts = f", experts over {parallel.expert} ranks" if parallel.expert > 1 else ""
    return f"{ranks}, {parallel.strategy}{layers}{experts}{where}{limit}"


def _batch(recipe: Recipe) -> str:
    schedule = recipe.schedule
    rows = count(schedule.micro_batch, "row")
    ranks = count(recipe.data_ranks, "group" if recipe.parallel.tensor > 1 else "rank")
    product = f"{rows} x {schedule.grad_accum} accumulated x {ranks}"
    return f"{product} = {count(recipe.batch, 'row')} of up to {recipe.data.seq_len:,} tokens a step"


def _sentences(predicted: Prediction) -> str:
    """The forecast without its figures and tables."""
    return "\n".join(part for part in predicted.parts() if isinstance(part, str))


def _free_gb(path: Path) -> float:
    """GB (1e9) free where the folder will be."""
    return shutil.disk_usage(next(parent for parent in path.parents if parent.exists())).free / 1e9


def estimate_start(script: str) -> Start:
    """When Slurm would start this script if it were submitted now, by `sbatch --test-only`."""
    if not available():
        text = "at once, on this machine: no Slurm answers, and the local runner executes the same script"
        return Start(text, local=True)
    with tempfile.NamedTemporaryFile("w", suffix=".sbatch") as file:
        file.write(script)
        file.flush()
        answer = command("sbatch", "--test-only", file.name).stderr
    if found := re.search(r"Job \d+ to start at (\S+) using (\d+) processors on (?:nodes )?(\S+)", answer):
        text = f"about {found[1].replace('T', ' ')} on {found[3]}, as the queue is now (sbatch --test-only)"
        return Start(text, found[1])
    words = "; ".join(re.findall("(?:error|failure): (.+)", answer)) or answer.strip()
    return Start(f"Slurm would not take it: {words}. {advice(words)}".strip())
