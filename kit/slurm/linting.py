"""Lint job scripts for a cluster profile and for the Slurm of this machine, and with sbatch's own verdict."""

import re
from collections.abc import Iterable
from pathlib import Path

from kit.config.cluster import Cluster
from kit.lint.deepspeed import lint_deepspeed
from kit.lint.lint import Finding, lint, read_script
from kit.lint.report import LintReport
from kit.lint.rule import RULE_TEXTS
from kit.lint.site import Site
from kit.slurm.client import command, version

# sbatch could not ask the controller: the script was not judged.
NOT_JUDGED = re.compile(
    r"connect|contact|controller|timed out|munge|config(uration)?( source)?$", re.IGNORECASE | re.MULTILINE
)


def site_of(cluster: Cluster | None = None, release: str = "") -> Site:
    """What the linter may know of a cluster. release: of its Slurm, such as "22.05.8"; empty: unknown."""
    if cluster is None:
        return Site(release=release)
    return Site(
        options=frozenset(re.findall(r"--([\w-]+)", " ".join(cluster.slurm.options))),
        nodes=cluster.nodes.count,
        gpus_per_node=cluster.nodes.gpus,
        environment=cluster.environment,
        release=release,
    )


def lint_scripts(paths: Iterable[Path], cluster: Cluster | None = None) -> LintReport:
    """The findings in scripts, for the Slurm of this machine and with sbatch's own verdict, and in DeepSpeed's configs.

    Raises InputError for a file that cannot be read.
    """
    site = site_of(cluster, version())
    texts = {path: read_script(path) for path in paths}
    findings = [finding for path, text in texts.items() for finding in _lint_script(path, text, site)]
    return LintReport({str(path): text for path, text in texts.items()}, findings)


def _lint_script(path: Path, text: str, site: Site) -> list[Finding]:
    if path.suffix == ".json":  # no batch script
        return lint_deepspeed(text, str(path))
    findings = lint(text, str(path), site)
    refused = any(finding.severity == "error" and finding.rule.startswith("KS1") for finding in findings)
    return findings if refused or not site.release else [*findings, *sbatch_verdict(path)]


def sbatch_verdict(path: Path) -> list[Finding]:
    """What `sbatch --test-only` refuses, as a finding; without an answer from Slurm an empty list.

    sbatch parses options without a controller; limits and resources are judged by a controller that answers.
    """
    answer = command("sbatch", "--test-only", str(path)).stderr
    if NOT_JUDGED.search(answer):
        return []
    errors = "; ".join(re.findall("(?:error|failure): (.+)", answer))
    if not errors:
        return []
    message = f"sbatch refuses the script: {errors}."
    return [Finding(str(path), "KS108", "error", 1, message, RULE_TEXTS["KS108"].fix)]
