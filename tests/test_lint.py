"""Each rule finds a faulty script and leaves the right ones alone; sbatch itself agrees about options."""

import json
import shutil
import subprocess
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from kit.cluster import Cluster, Slurm
from kit.errors import InputError
from kit.lint import RULES, Finding, fix, lint, lint_file
from kit.script import Script
from kit.shell import SBATCH

GOOD = """\
#!/bin/bash
#SBATCH --job-name=finetune
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=64
#SBATCH --gres=gpu:8
#SBATCH --time=12:00:00
#SBATCH --output=slurm-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=USR2@300
set -euo pipefail
export PYTHONUNBUFFERED=1

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export HEAD_ADDRESS=$(getent hosts "$head" | awk '{ print $1; exit }')
export HEAD_PORT=$((20000 + SLURM_JOB_ID % 12000))

# One task a node; each node reads its own rank.
srun --ntasks-per-node=1 --kill-on-bad-exit=1 bash -c '
  accelerate launch --num_machines "$SLURM_NNODES" --num_processes "$((SLURM_NNODES * SLURM_GPUS_ON_NODE))" \\
    --machine_rank "$SLURM_NODEID" --main_process_ip "$HEAD_ADDRESS" --main_process_port "$HEAD_PORT" \\
    train.py --resume_from_checkpoint latest
'
"""

HEAD = "#SBATCH --time=1:00:00 --cpus-per-task=8 --gres=gpu:8 --nodes={nodes}\n"
SET = "set -euo pipefail\nexport PYTHONUNBUFFERED=1\n"
C10D = "--rdzv_backend=c10d --rdzv_id=$SLURM_JOB_ID"


def one(body: str, more: str = "", nodes: int = 1, set_: str = SET) -> str:
    return "#!/bin/bash\n" + HEAD.format(nodes=nodes) + more + set_ + body + "\n"


def two(body: str, more: str = "", set_: str = SET) -> str:
    return one(body, more, 2, set_)


def option(text: str) -> str:
    return f"#!/bin/bash\n#SBATCH --time=10 {text}\nhostname\n"


ADDRESS = 'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
TOKEN = "hf_" + "AbCdEfGhIjKlMnOpQrStUvWxYz01234567"  # made up

FAULTY = [
    ("KS101", "error", "#!/bin/bash\n#SBATCH \u2013nodes=2\n#SBATCH --time=10\nhostname\n"),
    ("KS101", "error", option("--nodes=4\u00a0-c 2")),
    ("KS101", "error", one("srun -n1 python train.py \u2013config=a.yaml")),
    ("KS102", "error", "#!/bin/bash\nset -e\n#SBATCH --time=10\nhostname\n"),
    ("KS103", "warning", "#!/bin/bash\n#SBATCH --time=10\n# SBATCH --nodes=2\nhostname\n"),
    ("KS103", "warning", "#!/bin/bash\n#SBATCH --time=10\n#SABTCH -N 2\nhostname\n"),
    ("KS103", "warning", "#!/bin/bash\n#SBATCH --time=10\n #SBATCH -N 2\nhostname\n"),
    ("KS103", "warning", "#!/bin/bash\n#SBATCH --time=10\n#sbatch --nodes=2\nhostname\n"),
    ("KS103", "warning", "#!/bin/bash\n#SBATCH --time=10\nSBATCH --nodes=2\n"),
    ("KS104", "error", "# Licence\n#!/bin/bash\n#SBATCH --time=10\nhostname\n"),
    ("KS104", "error", "\n#!/bin/bash\n#SBATCH --time=10\nhostname\n"),
    ("KS105", "error", "#!/bin/bash\r\n#SBATCH --time=10\r\nhostname\r\n"),
    ("KS106", "error", option("--nodes=$N")),
    ("KS106", "error", option("--output=~/x-%j.out")),
    ("KS107", "error", option("-A <account>")),
    ("KS107", "error", option("--qos={{ qos }}")),
    ("KS107", "error", option("--partition=CHANGEME")),
    ("KS108", "error", option("--ntask-per-node=4")),
    ("KS108", "error", option("--time = 1:00")),
    ("KS108", "error", option("--partition==gpu")),
    ("KS108", "error", option("-J=name")),
    ("KS108", "error", option("-job_name x")),
    ("KS108", "error", option("-partition=gpu")),
    ("KS108", "error", option("nodes=4")),
    ("KS108", "warning", option("--frobnicate=4")),
    ("KS109", "error", option("--mem=4G --mem-per-cpu=1G")),
    ("KS109", "error", option("--cpus-per-gpu=2 --cpus-per-task=2")),
    ("KS110", "warning", option("--nodes=2 -N 3")),
    ("KS111", "error", option("") + "echo 'never closed\n"),
    ("KS201", "warning", option("--output=no_such_folder/%j.out")),
    ("KS201", "error", option("--output=no_such_folder/%j.out") + "mkdir -p no_such_folder\n"),
    ("KS202", "warning", option("--output=train.log")),
    ("KS202", "warning", option("--array=0-3 --output=train-%A.log")),
    ("KS203", "warning", option("--requeue")),
    ("KS301", "warning", "#!/bin/bash\nhostname\n"),
    ("KS301", "warning", one("python train.py", "#SBATCH --time=72:00:00\n")),
    ("KS302", "error", one("torchrun --standalone --nproc_per_node=16 train.py")),
    ("KS302", "error", two(f"srun torchrun --nnodes=4 {C10D} --rdzv_endpoint=$H:$P train.py")),
    ("KS302", "error", one("accelerate launch --num_processes 16 train.py")),
    ("KS303", "error", one("srun torchrun --nproc_per_node=8 train.py", "#SBATCH --ntasks-per-node=8\n")),
    ("KS303", "error", one("srun -n 8 accelerate launch train.py")),
    ("KS304", "error", two(f"torchrun --nnodes=2 {C10D} --rdzv_endpoint=$H:$P train.py")),
    ("KS304", "error", two("accelerate launch --config_file a.yaml train.py")),
    ("KS305", "warning", option("--ntasks=8 --gres=gpu:8 -c 4")),
    ("KS308", "warning", one("export CUDA_VISIBLE_DEVICES=0,1\npython train.py")),
    ("KS309", "warning", option("--gres=gpu:8")),
    ("KS401", "error", two("srun torchrun --nnodes=2 --node_rank=$SLURM_PROCID --master_addr=$H train.py")),
    ("KS401", "error", two('srun bash -c "accelerate launch --machine_rank $SLURM_NODEID train.py"')),
    ("KS401", "error", two("R=$SLURM_NODEID\nsrun accelerate launch --machine_rank $R train.py")),
    ("KS401", "error", two("export R=$SLURM_NODEID\nsrun bash -c 'accelerate launch --machine_rank $R train.py'")),
    ("KS401", "warning", two(f"srun torchrun --nnodes=2 {C10D} --rdzv_endpoint=$H:$P --node_rank $SLURM_PROCID t.py")),
    ("KS403", "error", two(f"srun torchrun --nnodes=2 {C10D} --rdzv_endpoint=$SLURM_NODELIST:$P train.py")),
    ("KS403", "error", two("export MASTER_ADDR=$SLURM_JOB_NODELIST\nsrun -K python train.py")),
    ("KS404", "error", two("export MASTER_ADDR=localhost\nsrun -K python train.py")),
    ("KS404", "error", two("srun -K bash -c 'export MASTER_ADDR=$(hostname); python train.py'")),
    (
        "KS404",
        "error",
        two("MASTER_ADDR=$(scontrol show hostnames | head -1 || echo localhost)\nsrun -K python a.py"),
    ),
    ("KS406", "warning", one("torchrun --nproc_per_node=8 --master_port=29500 train.py")),
    ("KS406", "warning", two(ADDRESS + "export MASTER_PORT=29500\nsrun -K python train.py")),
    ("KS407", "error", one("export MASTER_PORT=$(shuf -i 0-65535 -n 1)\npython train.py")),
    ("KS407", "error", one("torchrun --nproc_per_node=8 --master_port=$RANDOM train.py")),
    ("KS407", "error", two("srun -K bash -c 'export MASTER_PORT=$((20000 + RANDOM % 9)); python train.py'")),
    ("KS408", "warning", two("srun torchrun --nnodes=2 --rdzv_id 101 --rdzv_backend c10d --rdzv_endpoint $H:$P t.py")),
    ("KS409", "error", one("srun -n1 LR=3 python train.py")),
    ("KS411", "error", two("scontrol show hostnames $SLURM_JOB_NODELIS")),
    ("KS413", "error", two("srun torchrun --standalone --nproc_per_node=8 train.py")),
    ("KS413", "warning", one("torchrun --standalone --nproc_per_node=8 --master_port=$P train.py")),
    ("KS415", "info", one("python -m torch.distributed.launch --nproc_per_node=8 --master_port=$P train.py")),
    ("KS415", "info", one("export NCCL_ASYNC_ERROR_HANDLING=1\npython train.py")),
    ("KS416", "info", two("srun python train.py")),
    ("KS501", "error", one("srun -n1 python train.py\necho done", set_="")),
    ("KS501", "error", one("torchrun --standalone --nproc_per_node=8 train.py\n\ndate", set_="")),
    ("KS502", "error", one("srun -n1 python train.py 2>&1 | tee log", set_="set -e\n")),
    ("KS503", "error", one("srun -n1 python train.py &")),
    ("KS501", "error", one("srun -n1 bash train.sh\necho done", set_="")),
    ("KS503", "warning", one("srun -n1 python train.py &\nwait")),
    ("KS505", "warning", one("python train.py", "#SBATCH --time=13:00:00\n")),
    ("KS505", "warning", one("torchrun --standalone --max_restarts=3 train.py", "#SBATCH --time=13:00:00\n")),
    ("KS505", "warning", one("python train.py", "#SBATCH --requeue --open-mode=append\n")),
    ("KS506", "error", one("srun -n1 python train.py", "#SBATCH --signal=B:TERM@120\n")),
    ("KS506", "error", one("trap save USR1\nsrun -n1 python train.py", "#SBATCH --signal=B:USR1@60\n")),
    ("KS506", "error", one("trap save SIGUSR1\nsrun -n1 python t.py &\nwait $!", "#SBATCH --signal=USR1@60\n")),
    ("KS508", "error", one("python t.py --resume || scontrol requeue $SLURM_JOB_ID", "#SBATCH --array=0-3\n")),
    ("KS508", "error", one("trap 'scontrol requeue $SLURM_JOB_ID' USR2\npython a.py", "#SBATCH --array=0-3\n")),
    ("KS601", "error", one(f"export HF_TOKEN={TOKEN}\npython train.py")),
    ("KS601", "error", one(f"wandb login {'0123456789abcdef' * 2}01234567\npython train.py")),
    ("KS602", "warning", one("python train.py --token $HF_TOKEN")),
    ("KS602", "warning", one('wandb login "$WANDB_API_KEY"')),
    ("KS602", "warning", one("srun --export=ALL,HF_TOKEN=$T python train.py")),
    ("KS604", "info", one("export NCCL_IB_DISABLE=1 NCCL_SOCKET_IFNAME=bond0\npython train.py")),
    ("KS605", "warning", one("CUDA_LAUNCH_BLOCKING=1 python train.py")),
    ("KS606", "warning", one("pip install -r requirements.txt\npython train.py")),
    ("KS606", "warning", one("srun -n1 bash -c 'git clone https://example.org/x && python train.py'")),
    ("KS609", "info", one("python train.py", set_="set -e\n")),
]

# The catalogue's known false positives, and other right scripts that look like a fault.
RIGHT = [
    ("KS101", option("--job-name=modèle # plain – comment")),
    ("KS101", one('echo "a –b" –c\npython train.py --name=modèle')),
    ("KS102", one("cat > job.sh <<EOF\n#!/bin/bash\n#SBATCH --nodes=4\nsrun x\nEOF")),
    ("KS102", one("cat <<-'END' > job.sh\n#SBATCH --nodes=4\n\tEND")),
    ("KS103", "#!/bin/bash\n##SBATCH --nodes=4\n# Batch of runs - see below\nhostname\n"),
    ("KS106", one("cat > job.sh <<EOF\n#SBATCH --nodes=$N\nEOF")),
    ("KS106", option("--comment='costs $5'")),
    ("KS107", option("--nodelist=node[1-4] --job-name=my_job")),
    (
        "KS108",
        option("--container-image=a.sqsh --container-name=x --segment=2 --quotatype=auto --out=a --nice=5"),
    ),
    ("KS110", option("--mail-type=END --mail-type=FAIL")),
    ("KS111", "#!/usr/bin/env python\nprint('it is no shell script')\n"),
    ("KS202", option("--output=train.log --open-mode=append")),
    ("KS202", option("--output=%x-%j.out --error=/dev/null")),
    ("KS202", option("--array=0-3 --output=%A_%a.out")),
    ("KS302", one("torchrun --standalone --nproc_per_node=16 train.py", "#SBATCH --gres=gpu:a100_1g.5gb:1\n")),
    ("KS302", two("srun -N1 torchrun --standalone --nnodes=1 train.py")),
    ("KS303", one("srun --ntasks-per-node=1 torchrun --nproc_per_node=8 t.py", "#SBATCH --ntasks-per-node=8\n")),
    ("KS303", two("srun -n $SLURM_NNODES torchrun --nproc_per_node=8 t.py", "#SBATCH --ntasks-per-node=8\n")),
    ("KS303", one("srun torchrun --nnodes=8 --nproc_per_node=1 t.py", "#SBATCH --ntasks-per-node=8\n")),
    ("KS304", two("mpirun -np 2 torchrun --nnodes=2 train.py")),
    ("KS304", two('for h in a b; do ssh "$h" torchrun --nnodes=2 train.py & done; wait')),
    ("KS304", two("deepspeed --hostfile h train.py")),
    ("KS304", two("CMD='torchrun --nnodes=2 train.py'\nsrun bash -c \"$CMD\"")),
    ("KS305", option("-n1 --gres=gpu:1")),
    ("KS308", one("python train.py", "#SBATCH --exclusive\n") + "CUDA_VISIBLE_DEVICES=0 python eval.py\n"),
    ("KS308", one("CUDA_VISIBLE_DEVICES=0 python a.py &\nCUDA_VISIBLE_DEVICES=1 python b.py &\nwait %1 && wait %2")),
    ("KS309", option("--gres=gpu:8 --exclusive")),
    ("KS401", two("srun bash -c 'torchrun --node_rank=$SLURM_NODEID train.py'")),
    ("KS401", two('srun bash -c "torchrun --node_rank=\\$SLURM_NODEID train.py"')),
    ("KS401", two("C='accelerate launch --machine_rank $SLURM_NODEID t.py'\nsrun bash -c \"$C\"")),
    ("KS401", two('C="accelerate launch --machine_rank \\$SLURM_NODEID t.py"\nsrun bash -c "$C"')),
    ("KS401", one("srun -n1 torchrun --node_rank=$SLURM_PROCID train.py")),
    ("KS401", two("NODE_RANK=$SLURM_PROCID\nsrun python train.py")),
    ("KS403", two(ADDRESS + "export MASTER_ADDR=$head\nsrun python train.py")),
    ("KS404", one("export MASTER_ADDR=localhost\npython train.py")),
    ("KS404", two("export MASTER_ADDR=$(hostname)\nsrun python train.py")),
    ("KS406", one("torchrun --master_port=29500 train.py", "#SBATCH --exclusive\n")),
    ("KS406", one("torchrun --rdzv_backend=c10d --rdzv_endpoint=localhost:0 train.py")),
    ("KS407", two("export MASTER_PORT=$(shuf -i 20000-29999 -n 1)\nsrun python train.py")),
    ("KS409", one("LR=3 srun env X=1 python train.py lr=3")),
    ("KS411", one('echo "$SLURM_JOB_NODELIST $SLURM_MY_SITE $SLURM_JOB_ID_HET_GROUP_1"')),
    ("KS413", one("torchrun --standalone --nproc_per_node=8 train.py")),
    ("KS416", two("srun -K1 python train.py")),
    (
        "KS416",
        two('srun bash -c "source venv/bin/activate; cd x; torchrun --nnodes=2 --node_rank=\\$SLURM_NODEID t.py"'),
    ),
    ("KS501", one("srun -n1 python train.py\nrc=$?\necho done\nexit $rc", set_="")),
    ("KS501", one("srun -n1 python train.py || exit 1\necho done", set_="")),
    ("KS501", one("if ! srun -n1 python train.py; then echo failed; exit 1; fi\necho done", set_="")),
    ("KS501", one("echo start\nsrun -n1 python train.py", set_="")),
    ("KS501", one("srun -n1 python train.py\necho done", set_="").replace("/bin/bash", "/bin/bash -e")),
    ("KS502", one("python train.py | tee log\nexit ${PIPESTATUS[0]}", set_="")),
    ("KS502", one("squeue | tee log\nsrun -n1 python train.py > >(tee log)", set_="")),
    ("KS503", one("srun -n1 vllm serve m &\nsrun -n1 python train.py")),
    ("KS503", one('srun -n1 python train.py &\npid=$!\nwait "$pid"')),
    (
        "KS503",
        one('for i in 1 2; do srun -n1 python a.py $i & p+=($!); done\nfor q in "${p[@]}"; do wait "$q" || rc=1; done'),
    ),
    ("KS505", one("python train.py --resume auto", "#SBATCH --time=2-00\n")),
    ("KS506", one("trap save USR1\nsrun -n1 python t.py &\nwait $!", "#SBATCH --signal=B:USR1@60\n")),
    ("KS506", one("srun -n1 python train.py", "#SBATCH --signal=USR1@60\n")),
    ("KS506", one("source traps.sh\nsrun -n1 python train.py", "#SBATCH --signal=B:USR1@60\n")),
    ("KS506", one("exec srun -n1 python train.py", "#SBATCH --signal=B:USR1@60\n")),
    ("KS508", one("python a.py || scontrol requeue $SLURM_JOB_ID")),
    ("KS601", one("git checkout 0123456789abcdef0123456789abcdef01234567\nexport HF_TOKEN=$(cat ~/.hf)")),
    ("KS601", one("export HF_TOKEN=hf_xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx")),
    ("KS602", one('export HF_TOKEN\n[ -n "$HF_TOKEN" ]\npython t.py --tokenizer $TOKENIZER --n $NUM_TOKENS')),
    ("KS602", one("srun --export=ALL,HF_TOKEN python train.py")),
    ("KS606", one("git rev-parse HEAD\npip list\npython train.py")),
    ("KS609", one("python -u train.py", set_="set -e\n")),
]


PUBLISHED = [  # scripts written for this test with the faults of published recipes
    (
        {"KS101"},
        "#!/bin/bash\n#SBATCH \u2013job-name=pretrain # name\n#SBATCH \u2013gres=gpu:8\n"
        "srun litgpt pretrain \\\n\u2013config=/data/config.yaml \\\nLlama\n",
    ),
    (
        {"KS406", "KS301", "KS505"},
        "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1 --gres=gpu:8 --cpus-per-task=32 --time=48:00:00\n"
        + SET
        + 'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_NODELIST" | head -n 1) MASTER_PORT=29500\n'
        "srun bash -c 'accelerate launch --main_process_ip $MASTER_ADDR --main_process_port $MASTER_PORT \\\n"
        "  --machine_rank $SLURM_NODEID --num_machines 2 --num_processes 16 train.py'\n",
    ),
    (
        {"KS303", "KS403", "KS301", "KS201"},
        "#!/bin/bash\n#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=8\n#SBATCH --gres=gpu:8\n#SBATCH --time=72:00:00\n"
        "#SBATCH --output=no_such_folder/%j.out\nmodule load cuda\nsrun torchrun \\\n  --nnodes=$SLURM_NNODES \\\n"
        "  --nproc_per_node=8 \\\n  --rdzv_id=$SLURM_JOB_ID \\\n  --rdzv_backend=c10d \\\n"
        "  --rdzv_endpoint=$SLURM_NODELIST \\\n  train.py --data /scratch/tokens\n",
    ),
]


def rules(text: str, **more: object) -> set[tuple[str, str]]:
    return {(f.rule, f.severity) for f in lint(text, **more)}  # type: ignore[arg-type]


def test_a_good_script_has_no_error_and_no_warning() -> None:
    assert [f for f in lint(GOOD) if f.severity != "info"] == []


@pytest.mark.parametrize(("rule", "severity", "text"), FAULTY)
def test_a_fault_is_found(rule: str, severity: str, text: str) -> None:
    assert (rule, severity) in rules(text)


@pytest.mark.parametrize(("rule", "severity", "text"), FAULTY)
def test_no_other_error_comes_along(rule: str, severity: str, text: str) -> None:
    assert {r for r, s in rules(text) if s == "error"} - {rule} == set()


@pytest.mark.parametrize(("rule", "text"), RIGHT)
def test_a_right_script_is_left_alone(rule: str, text: str) -> None:
    found = lint(text)
    assert [f for f in found if f.rule == rule] == []
    assert [f for f in found if f.severity == "error"] == []


@pytest.mark.parametrize(("expected", "text"), PUBLISHED)
def test_the_faults_of_published_recipes_are_found(expected: set[str], text: str) -> None:
    assert expected <= {rule for rule, _ in rules(text)}


def test_every_rule_has_a_faulty_script() -> None:
    assert {(r.id, r.severity) for r in RULES} == {(rule, severity) for rule, severity, _ in FAULTY}


def test_findings_are_plain_json_in_line_order() -> None:
    found = lint(two("srun python train.py --token $HF_TOKEN", "#SBATCH --requeue\n"), "job.sh")
    rows = json.loads(json.dumps([asdict(f) for f in found]))
    assert [set(r) for r in rows] == [{"file", "rule", "severity", "line", "message", "fix"}] * len(found)
    assert [f.line for f in found] == sorted(f.line for f in found)
    assert {f.file for f in found} == {"job.sh"}


@pytest.mark.parametrize(("rule", "severity", "text"), FAULTY)
def test_a_message_is_a_filled_sentence(rule: str, severity: str, text: str) -> None:
    found = [f for f in lint(text) if f.rule == rule]
    for f in found:
        assert f.message.endswith(".") and f.fix.endswith(".") and 1 <= f.line <= text.count("\n") + 1
        assert "{}" not in f.message and "\ue000" not in f.message and TOKEN not in f.message


@pytest.mark.parametrize(
    ("rule", "line", "text"),
    [
        ("KS105", 1, "#!/bin/bash\r\nhostname\r\n"),
        ("KS102", 5, "#!/bin/bash\n\n# x\nset -e\n#SBATCH --nodes=2\n"),
        ("KS106", 3, "#!/bin/bash\n#SBATCH --time=10\n#SBATCH --output=$HOME/%j\nhostname\n"),
        ("KS111", 4, "#!/bin/bash\n#SBATCH --time=10\n\nif true; fi\n"),
        ("KS401", 6, two("srun torchrun \\\n  --nnodes=2 \\\n  --node_rank=$SLURM_PROCID t.py").replace(SET, "\n")),
        ("KS502", 7, one("\nA='\nx'\npython t.py | tee log", set_="\n")),
    ],
)
def test_the_line_is_that_of_the_fault(rule: str, line: int, text: str) -> None:
    assert [f.line for f in lint(text) if f.rule == rule] == [line]


def test_a_secret_is_not_repeated() -> None:
    found = lint(one(f"export HF_TOKEN={TOKEN}\npython train.py --token {TOKEN}"))
    assert [f.rule for f in found if f.severity == "error"] == ["KS601", "KS601"]
    assert TOKEN not in str(found)


def test_the_log_folder_may_be_here_or_beside_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "jobs" / "a.sbatch"
    script.parent.mkdir()
    script.write_text(option("--output=logs/%j.out"))
    assert [(f.rule, f.severity) for f in lint_file(script)] == [("KS201", "error")]
    (script.parent / "logs").mkdir()
    assert lint_file(script) == []
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert lint(option("--output=here/%j.out")) == []
    assert rules(option(f"--output={tmp_path}/there/%j.out")) == {("KS201", "error")}
    assert rules(option("--output=/no_such_mount/logs/%j.out")) == {("KS201", "warning")}


def test_a_cluster_knows_its_own_options_and_network() -> None:
    cluster = Cluster("c", slurm=Slurm(options=("--frobnicate=1",)), environment={"NCCL_IB_DISABLE": "1"})
    text = one("export NCCL_IB_DISABLE=1\npython train.py", "#SBATCH --frobnicate=1\n")
    assert rules(text) == {("KS108", "warning"), ("KS604", "info")}
    assert lint(text, cluster=cluster) == []


def test_a_template_may_hold_placeholders_and_no_shell() -> None:
    text = option("--partition={{ partition }}") + "{% if x %}\n(\n{% endif %}\n"
    assert rules(text, file="job.sbatch.j2") == set()
    assert {r for r, _ in rules(text)} == {"KS107", "KS111"}


def test_a_python_batch_script_is_read_for_its_directives_only() -> None:
    assert rules("#!/usr/bin/env python\n#SBATCH --time=10\nprint('''$(''')\n") == set()


def test_bytes_that_are_no_text_are_read_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "latin.sh"
    path.write_bytes(option("--time=10").encode() + b"echo caf\xe9\n")
    assert lint_file(path) == []


def test_a_missing_file_is_a_wrong_call(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        lint_file(tmp_path / "absent.sh")


BROKEN = """\
#!/bin/bash\r
#SBATCH \u2013nodes=2 \u2014N 2\u00a0--time=10\r
 #SBATCH --requeue\r
#SABTCH --mem=0\r
# SBATCH --exclusive\r
echo "a \u2013b" > log\r
srun python train.py \u2013\u002dname=x \u2013n 3 \u2013 y\r
"""

FIXED = """\
#!/bin/bash
#SBATCH --nodes=2 -N 2 --time=10
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --mem=0
# SBATCH --exclusive
export PYTHONUNBUFFERED=1
echo "a \u2013b" > log
srun --kill-on-bad-exit=1 python train.py --name=x -n 3 \u2013 y
"""


def test_safe_faults_are_mended_and_nothing_else() -> None:
    assert fix(BROKEN) == FIXED
    assert fix(FIXED) == FIXED


@pytest.mark.parametrize(("rule", "severity", "text"), FAULTY)
def test_mending_is_done_once_and_adds_no_fault(rule: str, severity: str, text: str) -> None:
    mended = fix(text)
    assert fix(mended) == mended
    assert {f.rule for f in lint(mended)} <= {f.rule for f in lint(text)}


def test_a_right_script_is_not_touched() -> None:
    assert fix(GOOD) == GOOD


def test_own_rules_take_less_than_50_ms(monkeypatch: pytest.MonkeyPatch) -> None:
    text = GOOD + "\n".join(f'export A{i}="$A{i - 1} x" # comment\necho "$(date) $A{i}" | tee log' for i in range(100))
    monkeypatch.setenv("PATH", "")  # no bash -n
    took = []
    for _ in range(5):
        start = time.process_time()
        lint(text)
        took.append(time.process_time() - start)
    assert min(took) < 0.05


def sbatch(folder: Path, text: str) -> tuple[bool, dict[str, str], str]:
    """Whether sbatch takes a script, and the options it resolved. It reaches no controller: port 1 answers nobody."""
    conf, script = folder / "slurm.conf", folder / "job.sh"
    conf.write_text(
        "ClusterName=client\nSlurmctldHost=localhost\nSlurmctldPort=1\nMessageTimeout=1\nAuthType=auth/none\n"
        "CredType=cred/none\nGresTypes=gpu\nSelectType=select/cons_tres\n"
    )
    script.write_text(text)
    command = ["sbatch", "--test-only", "-v", str(script)]
    environment = {"SLURM_CONF": str(conf), "PATH": str(Path(str(shutil.which("sbatch"))).parent), "LANG": "C.UTF-8"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    rows = [r.removeprefix("sbatch: ").partition(" : ") for r in done.stderr.splitlines() if " : " in r]
    return "connect failure" in done.stderr, {k.strip(): v.strip() for k, _, v in rows}, done.stderr


def refused(text: str) -> list[Finding]:
    """What the linter says that sbatch itself would refuse: errors of the KS1 family."""
    return [f for f in lint(text) if f.severity == "error" and f.rule.startswith("KS1")]


needs_sbatch = pytest.mark.skipif(
    shutil.which("sbatch") is None, reason="sbatch (Debian: slurm-client) is not installed"
)

DIRECTIVES = [
    "--nodes=2 --ntasks-per-node=1 --gres=gpu:8 --time=1-12:30 --mem=64G",
    "-N2 -n16 -c8 -pgpu -J x -t 15",
    "--nodes 2-4 --signal=B:USR1@90 --open-mode=append --requeue",
    "--out=x --err=y --job=z",
    "--job-name=a#b",
    "--job-name='x # y' # comment",
    "--nodes=4 \\",
    "--mem=500000mb --time=UNLIMITED --exclusive=user --nice=5",
    "--nodes=2 --ntasks=4 --ntasks-per-node=4",
    "--nodes=1 --ntasks=16 --ntasks-per-node=8",
    "--mem=64",
    "hetjob",
    "--no=1",
    "--ntask=2",
    "--ntasks-per-nod=2 --gpus-per-node=a100:4",
    "--ntask-per-node=4",
    "--time=48h",
    "--time=2 days",
    "--time = 1:00",
    "--time=1:2:3:4",
    "--mem=64GiB",
    "--mem=1.5G",
    "--gres=gpus:4",
    "--gres=gpu=4",
    "--gres=4",
    "--signal=USR1:90",
    "--signal=SIGUSR2@60",
    "--signal=WINCH@60",
    "--open-mode=new",
    "--exclusive=yes",
    "--requeue=1",
    "--nodes=two",
    "--nodes=$N",
    "--nodes",
    "--ntasks=0",
    "--cpus-per-task=4.5",
    "--mem=4G --mem-per-cpu=1G",
    "--mem-per-cpu=4G --mem-per-gpu=1G",
    "--cpus-per-gpu=2 --cpus-per-task=2",
    "-N=4",
    "-t=1:00",
    "-job_name x",
    "-x",
    "nodes=4",
    "\u2013nodes=4",
    "--nodes\u00a0=4",
    "--nodes=2 --nodes=3 --mail-type=END --mail-type=FAIL",
]


@needs_sbatch
@pytest.mark.parametrize("directive", DIRECTIVES)
def test_sbatch_agrees_about_options(tmp_path: Path, directive: str) -> None:
    text = f"#!/bin/bash\n#SBATCH {directive}\nhostname\n"
    taken, resolved, said = sbatch(tmp_path, text)
    assert taken == (not refused(text)), said
    if taken:
        assert resolved.keys() - {"test-only", "verbose"} == Script(text).asked.keys()
        same = resolved.keys() & {"nodes", "ntasks", "job-name", "partition", "gpus-per-node", "cpus-per-task"}
        assert {name: Script(text).value(name) for name in same} == {name: resolved[name] for name in same}


@needs_sbatch
@pytest.mark.parametrize(
    "text",
    [
        "#!/bin/bash\r\nhostname\r\n",
        "\n#!/bin/bash\nhostname\n",
        "\ufeff#!/bin/bash\nhostname\n",
        "#!/usr/bin/env python\n#SBATCH -n 1\nprint()\n",
        GOOD,
    ],
)
def test_sbatch_agrees_about_the_file(tmp_path: Path, text: str) -> None:
    taken, _, said = sbatch(tmp_path, text)
    assert taken == (not refused(text)), said


@needs_sbatch
def test_sbatch_knows_the_same_options(tmp_path: Path) -> None:
    later = ("container-id", "tres-bind", "tres-per-task", "oom-kill-step", "segment", "stepmgr", "resv-ports")
    later += ("consolidate-segments",)
    for word in SBATCH.replace("extra= ", "").split():  # in 22.05 --extra is short for --extra-node-info
        name = word.rpartition("|")[2].rstrip("=?")
        _, _, said = sbatch(tmp_path, f"#!/bin/bash\n#SBATCH --{name}\nhostname\n")
        assert ("unrecognized" in said) == (name in later), said
        assert ("requires an argument" in said) == (word.endswith("=") and name not in later), said
