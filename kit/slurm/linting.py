"""Lint job scripts for a cluster profile and for the Slurm of this machine, and with sbatch's own verdict."""

import re
from collections.abc import Iterable
from pathlib import Path

from kit.config.cluster import Cluster
from kit.lint.lint import Finding, lint_file, rule_text
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


def lint_scripts(paths: Iterable[Path], cluster: Cluster | None = None) -> list[Finding]:
    """Findings in these files, for the Slurm of this machine.

    sbatch judges what the linter finds no fault in its options with. Raises InputError for a file that cannot be read.
    """
    site = site_of(cluster, version())
    return [finding for path in paths for finding in _lint_script(path, site)]


def _lint_script(path: Path, site: Site) -> list[Finding]:
    findings = lint_file(path, site)
    refused = any(finding.severity == "error" and finding.rule.startswith("KS1") for finding in findings)
    return findings if refused or not site.release else [*findings, *sbatch_verdict(path)]


def sbatch_verdict(path: Path) -> list[Finding]:
    """What `sbatch --test-only` refuses, as a finding; without an answer from Slurm there is none.

    sbatch parses options without a controller; limits and resources are judged by a controller that answers.
    """
    answer = command("sbatch", "--test-only", str(path)).stderr
    if NOT_JUDGED.search(answer):
        return []
    errors = "; ".join(re.findall("(?:error|failure): (.+)", answer))
    if not errors:
        return []
    return [Finding(str(path), "KS108", "error", 1, f"sbatch refuses the script: {errors}.", rule_text("KS108").fix)]
