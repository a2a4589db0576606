import dataclasses
import json

import pytest

from kit import evidence, slurm
from kit.cluster import Cluster
from kit.errors import InputError, KitError, SubmitError
from kit.run import Run


@pytest.fixture
def two_nodes(tmp_path):
    path = tmp_path / "two.toml"
    path.write_text(
        'name = "two"\n[nodes]\ncount = 2\ncpus = 2\nram_gib = 10\n[slurm]\npartition = "gpu"\ntime = "00:20:00"\n'
        '[environment]\nGLOO_SOCKET_IFNAME = "lo"\n[paths]\nruns = "runs"\n'
    )
    return Cluster.load(path)


@pytest.fixture
def spread(recipe):
    return recipe.override(**{"parallel.nodes": 2, "parallel.gpus_per_node": 1})


@pytest.mark.slow
@pytest.mark.slurm
def test_the_demos_fine_tune_runs_on_both_nodes_of_a_live_slurm(live_slurm, spread, two_nodes, smollm2):
    run = slurm.launch(spread.override(**{"model.name": str(smollm2), "schedule.max_steps": 3}), two_nodes)
    assert run.job_id.isdigit()
    end = slurm.wait(run, timeout=400)
    assert (end.state, end.exit_code, end.conflicts) == ("COMPLETED", 0, []), run.log.read_text()
    last = run.checkpoints()[-1] / "pytorch_model_fsdp_0"
    assert sorted(p.name for p in last.glob("*.distcp")) == ["__0_0.distcp", "__1_0.distcp"]
    assert {p.stem for p in (run.path / "nodes").glob("*.jsonl")} == {"node1", "node2"}
    assert {p.name for p in (run.path / "logs").glob("rank-*.log")} == {"rank-000.log", "rank-001.log"}
    assert json.loads((run.path / "state" / "start.0.json").read_text())["nodes"] == "node[1-2]"
    # Days later Slurm has forgotten the job; the run still tells.
    slurm_record = [r for r in evidence.records(run) if r["source"] == "slurm"][-1]
    evidence.witness(run, "slurm", gone=True)
    assert slurm_record["state"] == slurm.state(run).state == "COMPLETED"


@pytest.mark.slurm
def test_a_waiting_job_says_why_and_a_cancelled_one_says_so(live_slurm, spread, two_nodes, tmp_path):
    path = tmp_path / "drained.toml"
    path.write_text(two_nodes.toml().replace("options = []", 'options = ["--begin=now+1hour"]'))
    run = slurm.launch(spread, Cluster.load(path))
    assert slurm.state(run).state == "PENDING"
    assert slurm.why_pending(run).startswith("pending, reason BeginTime")
    slurm.cancel(run)
    assert slurm.wait(run, timeout=30).state == "CANCELLED"


@pytest.mark.slurm
def test_a_refusal_is_told_in_slurms_own_words_and_the_run_is_not_pending(live_slurm, spread, two_nodes, tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text(two_nodes.toml().replace('partition = "gpu"', 'partition = "nope"'))
    with pytest.raises(SubmitError, match="invalid partition specified: nope"):
        slurm.launch(spread, Cluster.load(path))
    from kit.run import runs

    assert slurm.state(next(runs())).state == "NOT SUBMITTED"


def test_a_job_that_does_not_fit_is_refused_with_a_way_out_unless_it_is_forced(recipe, local, tmp_path):
    small = dataclasses.replace(local, nodes=dataclasses.replace(local.nodes, ram_gib=0.5))
    job = recipe.override(**{"schedule.micro_batch": 64})
    with pytest.raises(KitError, match=r"tiny does not fit local: .* GiB allocated in .*--anyway"):
        slurm.launch(job, small)
    assert not (tmp_path / "runs").exists()
    slurm.cancel(slurm.launch(job, small, anyway=True))


def test_a_job_for_a_partition_never_runs_on_the_login_node_instead(recipe, two_nodes):
    with pytest.raises(InputError, match=r"No Slurm answers here, .* names the partition gpu"):
        slurm.launch(recipe, two_nodes)


@pytest.mark.slurm
def test_a_preempted_job_that_starts_again_is_asked_about_and_one_that_is_gone_keeps_its_word(
    live_slurm, recipe, local, tmp_path
):
    run = Run.create(recipe, local, tmp_path, "digest")
    run.note(job_id="999999")  # Slurm has forgotten it
    evidence.witness(run, "slurm", state="PREEMPTED")
    assert slurm.state(run).state == "PREEMPTED"
    evidence.witness(run, "slurm", state="PENDING")
    assert slurm.state(run).state == "LOST"


def test_a_model_without_weights_is_refused_before_a_job_waits_for_it(recipe, local, tmp_path):
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"no weights .*bare.*hf download"):
        slurm.launch(recipe.override(**{"model.name": str(tmp_path / "bare")}), local)
    with pytest.raises(InputError, match=r"no weights .*models--nobody--nothing"):
        slurm.launch(recipe.override(**{"model.name": "nobody/nothing"}), local)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parallel.strategy": "zero3"}, "zero3 can be forecast but not launched"),
        ({"tuning.method": "qlora"}, "qlora can be forecast but not launched"),
        ({"parallel.strategy": "fsdp1"}, "fsdp1 needs GPUs"),
        ({"parallel.sharding": "hybrid"}, "hybrid runs with fsdp1 only"),
        ({"parallel.nodes": 2}, "asks for 2 nodes x 2 GPUs; the cluster local has 1"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_made(recipe, local, tmp_path, changes, words):
    with pytest.raises(InputError, match=words):
        slurm.launch(recipe.override(**changes), local)
    assert not (tmp_path / "runs").exists() and not (tmp_path / "prepared").exists()
