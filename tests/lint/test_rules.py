"""Each rule finds its fault, and nothing in correct scripts."""

import pytest

from kit.lint.lint import lint
from kit.lint.rule import RULE_TEXTS
from kit.lint.rules import RULES
from kit.lint.site import Site
from kit.lint.table import CONDITIONS, PLACES
from tests.conftest import SHARED
from tests.lint.reduced import FALSE, MISSED
from tests.lint.scripts import CORRECT, FAULTY, GOOD, MUTANTS, ONE_NODE, PUBLISHED, STEPS, one, option, two


def rules(text: str, **more: object) -> set[tuple[str, str]]:
    """Rules and severities of the findings in a script."""
    return {(f.rule, f.severity) for f in lint(text, **more)}  # type: ignore[arg-type]


@pytest.mark.parametrize("text", [GOOD, ONE_NODE, STEPS])
@pytest.mark.parametrize("version", ["", "22.05.8", "23.02.1", "24.11"])
def test_a_correct_script_has_no_findings(text: str, version: str) -> None:
    assert lint(text, site=Site(release=version)) == []


@pytest.mark.parametrize(("rule", "text", "old", "new"), MUTANTS)
def test_one_fault_is_reported_by_one_rule(rule: str, text: str, old: str, new: str) -> None:
    assert old in text
    assert {f.rule for f in lint(text.replace(old, new), site=Site(release="22.05.8"))} == {rule}


def test_every_rule_is_tested_with_one_changed_script() -> None:
    assert RULES.keys() == {rule for rule, *_ in MUTANTS}
    assert len({rule for rule, *_ in MUTANTS}) >= 45


@pytest.mark.parametrize(("rule", "severity", "text"), [*FAULTY, *MISSED])
def test_a_fault_is_found(rule: str, severity: str, text: str) -> None:
    assert (rule, severity) in rules(text, site=Site(release="22.05.8"))


@pytest.mark.parametrize(("rule", "severity", "text"), [*FAULTY, *MISSED])
def test_one_fault_gives_no_other_error(rule: str, severity: str, text: str) -> None:
    assert {r for r, s in rules(text, site=Site(release="22.05.8")) if s == "error"} - {rule} == set()


@pytest.mark.parametrize(("rule", "text"), [*CORRECT, *FALSE])
def test_a_correct_script_that_resembles_a_fault_is_not_reported(rule: str, text: str) -> None:
    found = lint(text, site=Site(release="" if rule == "KS108" else "22.05.8"))
    assert [f for f in found if f.rule == rule] == []
    assert [f for f in found if f.severity == "error"] == []


def test_a_file_that_is_a_template_by_its_name_has_no_placeholders_to_fill_in() -> None:
    text = option("--account=<account>")
    assert [f for name in ("a.sh.j2", "my_template.sbatch") for f in lint(text, name) if f.severity == "error"] == []
    assert [f.rule for f in lint(text, "train.sbatch") if f.severity == "error"] == ["KS107"]


def test_a_fixed_host_in_a_variable_is_one_finding_wherever_the_variable_is_used() -> None:
    port = "srun torchrun --nnodes=2 --rdzv_backend=c10d --rdzv_endpoint=$MASTER_ADDR:$P train.py"
    found = lint(two(f"export MASTER_ADDR=10.0.0.17\n{port}"))
    assert [finding.line for finding in found if finding.rule == "KS417"] == [6]


def test_all_placeholders_of_a_script_are_one_finding() -> None:
    text = option("--account=<account>").replace("hostname", "#SBATCH --partition={partition}\n#SBATCH --qos=<qos>")
    found = [finding for finding in lint(text) if finding.rule == "KS107"]
    assert len(found) == 1 and "<account>, {partition}, <qos>" in found[0].message


@pytest.mark.parametrize(("expected", "text"), PUBLISHED)
def test_faults_of_published_recipes_are_found(expected: set[str], text: str) -> None:
    assert expected <= {rule for rule, _ in rules(text)}


def test_every_rule_has_a_faulty_script() -> None:
    assert {(id[:5], text.severity) for id, text in RULE_TEXTS.items()} == {
        (rule, severity) for rule, severity, _ in [*FAULTY, *MISSED]
    }


def test_every_text_in_rules_toml_belongs_to_a_rule() -> None:
    assert RULES.keys() == {id[:5] for id in RULE_TEXTS}


def test_rows_of_rules_toml_use_known_places_and_conditions() -> None:
    rows = [text.find for text in RULE_TEXTS.values() if text.find]
    assert set().union(*rows) == PLACES.keys() | CONDITIONS.keys()
    assert all(row.keys() & PLACES.keys() for row in rows)


@pytest.mark.parametrize(("version", "speaks"), [("22.05.8", True), ("23.02.7", True), ("23.11.1", False), ("", False)])
def test_srun_ignores_cpus_per_task_only_in_two_releases(version: str, speaks: bool) -> None:
    text = STEPS.replace(" SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK", "")
    assert ("KS410" in {f.rule for f in lint(text, site=Site(release=version))}) == speaks


@pytest.mark.parametrize(("version", "refused"), [("22.05.8", True), ("23.11", True), ("24.05", False), ("", False)])
def test_an_option_is_refused_in_releases_before_it_was_added(version: str, refused: bool) -> None:
    assert (("KS108", "error") in rules(option("--segment=2"), site=Site(release=version))) == refused


def test_the_message_of_bash_about_a_syntax_error_is_shown() -> None:
    (found,) = [f for f in lint(option("") + "done\n") if f.rule == "KS111"]
    assert "syntax error near unexpected `done'" in found.message


def test_a_missing_log_folder_is_not_reported_from_slurm_23_02_on() -> None:
    text = option("--output=no_such_folder/%j.out")
    assert [f.rule for f in lint(text, site=Site(release="22.05"))] == ["KS201"] and lint(
        text, site=Site(release="23.02.1")
    ) == []


def test_a_job_larger_than_the_cluster_is_an_error() -> None:
    site = Site(nodes=2, gpus_per_node=8)
    assert lint(option("--nodes=2 --gres=gpu:8 -c 8"), site=site) == []
    for asks, there in (("--nodes=3 --gres=gpu:8", "3 nodes, and the cluster has 2"), ("--gres=gpu:16", "has 8")):
        (found,) = lint(option(f"{asks} -c 8"), site=site)
        assert (found.rule, found.severity) == ("KS108", "error") and there in found.message


@pytest.mark.parametrize(
    ("report", "expected", "text"),
    [
        ("facebookincubator/submitit#1697", {"KS507"}, one("srun -n1 python t.py", "#SBATCH --signal=USR1@90\n")),
        (
            "huggingface/accelerate#2816, before",
            {"KS304", "KS401"},
            two("accelerate launch --num_machines 2 --machine_rank $SLURM_NODEID --main_process_ip $H train.py"),
        ),
        (
            "huggingface/accelerate#2816, after",
            {"KS401"},
            two("srun accelerate launch --num_machines 2 --machine_rank $SLURM_NODEID --main_process_ip $H train.py"),
        ),
        (
            "huggingface/accelerate#1645",
            {"KS401"},
            two('srun bash -c "accelerate launch --num_machines 2 --machine_rank $SLURM_PROCID train.py"'),
        ),
        (
            "mlc-ai/pith-train#91",
            {"KS404", "KS509"},
            two(
                "srun --container-image=i bash -c 'export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST"
                " | head -n1 || echo localhost); torchrun --nnodes=2 train.py'"
            ),
        ),
        (
            "Lightning-AI/pytorch-lightning#16828",
            {"KS307"},
            option("--nodes=1 --ntasks-per-node=8 --gpus-per-task=1 --cpus-per-task=8"),
        ),
        ("Lightning-AI/pytorch-lightning#20391", {"KS305"}, option("--ntasks=8 --gres=gpu:4 -c 8")),
        (
            "open-mmlab/mmdetection#7289",
            {"KS103", "KS302"},
            "#!/bin/bash\n#SBATCH --time=10 -N 2 -n 8 --gres=gpu:2 -c 2\n#SABTCH -e err.txt\nset -e\n"
            "srun -n 2 torchrun --nnodes=2 --nproc_per_node=4 train.py\n",
        ),
    ],
)
def test_faults_from_issues_of_other_projects_are_found(report: str, expected: set[str], text: str) -> None:
    assert expected <= {f.rule for f in lint(text, site=Site(release="22.05.8"))}, report


ENDS = {"000": ("Llama-3-70B-Instruct", {"KS101"}), "002": ("$SLURM_JOB_ID\n", {"KS303", "KS403", "KS301"})}


@pytest.mark.parametrize("number", ENDS)
def test_faults_in_scripts_of_published_articles_are_found(number: str) -> None:
    found = sorted((SHARED / "seeds").glob(f"{number}_*.txt"))
    if not found:
        pytest.skip(f"the articles are not here ({SHARED / 'seeds'}); set KIT_SHARED to a folder that has them")
    article, (end, expected) = found[0].read_text(), ENDS[number]
    script = article[article.index("#!/bin/bash") :]
    stop = script.index(end, script.index("srun"))
    stop = script.index(end, script.index("--output_dir")) if number == "002" else stop
    assert expected <= {f.rule for f in lint(script[: stop + len(end)] + "\n")}
