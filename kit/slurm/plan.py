"""What a launch would do: where, with how many ranks, how long, from when, and what is wrong. Nothing is submitted."""

import html
import re
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.data.dataset import find_prepared
from kit.errors import InputError
from kit.forecast.timing import predict
from kit.lint.lint import Finding, lint, slurm_version
from kit.slurm import client as queue
from kit.slurm import launch as slurm
from kit.slurm import script as sbatch


@dataclass(frozen=True)
class Plan:
    """The plan in words, by topic; the job script as it would be, and the linter's findings in it."""

    facts: dict[str, str]
    script: str
    findings: list[Finding]

    def lines(self) -> list[str]:
        """For a terminal."""
        told = [f"{name:12} {row}" for name, text in self.facts.items() for row in text.split("\n")]
        return told + self._beside()["text/plain"].splitlines()

    def _beside(self) -> dict[str, str]:
        from kit.notebook.magic import beside  # it loads IPython

        return beside(self.script, self.findings)

    def __repr__(self) -> str:
        return "\n".join(self.lines())

    def _repr_html_(self) -> str:
        style = "text-align:left;vertical-align:top;white-space:pre-line"
        cells = [(html.escape(name), html.escape(text)) for name, text in self.facts.items()]
        rows = "".join(f'<tr><th style="{style}">{n}</th><td style="{style}">{t}</td></tr>' for n, t in cells)
        script = f"<details><summary>the job script</summary><pre>{html.escape(self.script)}</pre></details>"
        return f'<table style="font-family:system-ui">{rows}</table>{self._beside()["text/html"]}{script}'


def plan(recipe: Recipe, cluster: Cluster, prepared: Path = Path("prepared")) -> Plan:
    """What `slurm.launch` would do with these. Raises InputError for what cannot run."""
    slurm.check(recipe, cluster)
    dataset = find_prepared(recipe, prepared)
    path = Path(cluster.paths.runs).absolute() / f"{recipe.name}-{time.strftime('%Y%m%d-%H%M')}"
    script = sbatch.draft(recipe, cluster, path, dataset.path if dataset else prepared.absolute(), "drawn-at-launch")
    found = [f for f in lint(script, "job.sbatch", cluster, slurm_version()) if f.rule != "KS201"]  # a new folder
    data = f"prepared in {dataset.path}" if dataset else f"{recipe.data.source} is prepared first, on this machine"
    facts = {
        "recipe": f"{recipe.name}: {recipe.tuning.method} of {recipe.model.name}",
        "nodes": _nodes(recipe, cluster),
        "batch": _batch(recipe),
        "data": data,
        "forecast": _forecast(recipe, cluster, dataset.manifest if dataset else None),
        "rendezvous": "at the address that Slurm has for the head node, on a free port picked by the job id; every "
        "node proves that it reaches it before any rank starts",
        "run folder": f"{path}, {_free(path):,.0f} GB free there",
        "starts": _start(script),
        "linter": f"{_count(len(found), 'finding')}, beside the lines below" if found else "no findings",
    }
    return Plan(facts, script, found)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _nodes(recipe: Recipe, cluster: Cluster) -> str:
    parallel, profile = recipe.parallel, cluster.slurm
    each = _count(parallel.gpus_per_node, "GPU" if cluster.nodes.gpus else "CPU rank")
    where = f", partition {profile.partition}" if profile.partition else ""
    limit = f", at most {profile.time}" if profile.time else ", without a time limit of its own"
    ranks = f"{_count(parallel.nodes, 'node')} x {each} = {_count(recipe.world_size, 'rank')}"
    return f"{ranks}, {parallel.strategy}{where}{limit}"


def _batch(recipe: Recipe) -> str:
    s = recipe.schedule
    product = f"{_count(s.micro_batch, 'row')} x {s.grad_accum} accumulated x {_count(recipe.world_size, 'rank')}"
    return f"{product} = {_count(recipe.batch, 'row')} of up to {recipe.data.seq_len:,} tokens a step"


def _forecast(recipe: Recipe, cluster: Cluster, manifest: dict[str, object] | None) -> str:
    try:
        return str(predict(recipe, cluster, manifest))
    except InputError as error:  # a family of models that it does not know
        return str(error)


def _free(path: Path) -> float:
    """GB free where the folder will be."""
    return shutil.disk_usage(next(p for p in path.parents if p.exists())).free / 1e9


def _start(script: str) -> str:
    """When Slurm says that the job would start, if it were submitted now: `sbatch --test-only`."""
    if not slurm.available():
        return "at once, on this machine: no Slurm answers, and the local runner executes the same script"
    with tempfile.NamedTemporaryFile("w", suffix=".sbatch") as file:
        file.write(script)
        file.flush()
        said = queue.command("sbatch", "--test-only", file.name).stderr
    if found := re.search(r"Job \d+ to start at (\S+) using (\d+) processors on (?:nodes )?(\S+)", said):
        return f"about {found[1].replace('T', ' ')} on {found[3]}, as the queue is now (sbatch --test-only)"
    words = "; ".join(re.findall("(?:error|failure): (.+)", said)) or said.strip()
    return f"Slurm would not take it: {words}. {slurm.advice(words)}".strip()
