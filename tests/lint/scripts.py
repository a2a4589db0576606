"""Batch scripts for the linter's tests: correct ones, and one for each fault."""

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
#SBATCH --signal=TERM@300
set -euo pipefail
export PYTHONUNBUFFERED=1

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export HEAD_ADDRESS=$(getent hosts "$head" | awk '{ print $1; exit }')
export HEAD_PORT=$((20000 + SLURM_JOB_ID % 12000))
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

# One task per node; each node reads its own rank.
srun --ntasks-per-node=1 --kill-on-bad-exit=1 bash -c '
  accelerate launch --num_machines "$SLURM_NNODES" --num_processes "$((SLURM_NNODES * SLURM_GPUS_ON_NODE))" \\
    --machine_rank "$SLURM_NODEID" --main_process_ip "$HEAD_ADDRESS" --main_process_port "$HEAD_PORT" \\
    train.py --resume_from_checkpoint latest
'
"""

ONE_NODE = """\
#!/bin/bash
#SBATCH --job-name=tune
#SBATCH --nodes=1
#SBATCH --gres=gpu:8
#SBATCH --cpus-per-task=64
#SBATCH --time=2:00:00
#SBATCH --output=tune-%j.out
set -euo pipefail
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=8

torchrun --standalone --nproc_per_node=8 train.py --lr 3e-4
"""

ARRAY = ONE_NODE.replace("--job-name=tune", "--array=0-3").replace("%j", "%A_%a")

# With srun: one task for each GPU, and no launcher.
STEPS = """\
#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gres=gpu:8
#SBATCH --cpus-per-task=8
#SBATCH --time=2:00:00
#SBATCH --output=steps-%j.out
set -euo pipefail
export PYTHONUNBUFFERED=1 SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR=$head MASTER_PORT=$((20000 + SLURM_JOB_ID % 12000))
srun --kill-on-bad-exit=1 python train.py
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

# A rule, its severity, and a script with the fault.
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
    ("KS107", "error", option("--account=your_account")),
    ("KS107", "error", option("--mail-user=your.name@example.org")),
    ("KS107", "error", option("--qos=[qos]")),
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
    ("KS201", "info", option("--output=no_such_folder/%j.out")),
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
    ("KS401", "error", two('eval "srun torchrun --nnodes=2 --node_rank=\\$SLURM_PROCID --master_addr=$H train.py"')),
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
    (
        "KS502",
        "error",
        one("if a; then s='torchrun t.py'; else s='torchrun --standalone t.py'; fi\n$s --lr 1 | tee log", set_=""),
    ),
    ("KS501", "error", one("docker run image sh -c 'python train.py'\necho done", set_="")),
    ("KS501", "error", one("python train.py\necho done\nexit", set_="")),
    ("KS501", "error", one("srun -n1 --container-image org/image:1 python train.py\necho done", set_="")),
    ("KS503", "error", one("srun -n1 python train.py &")),
    ("KS501", "error", one("srun -n1 bash train.sh\necho done", set_="")),
    ("KS503", "warning", one("srun -n1 python train.py &\nwait")),
    ("KS505", "warning", one("python train.py", "#SBATCH --time=13:00:00\n")),
    ("KS505", "warning", one("torchrun --standalone --max_restarts=3 train.py", "#SBATCH --time=13:00:00\n")),
    ("KS505", "warning", one("python train.py", "#SBATCH --requeue --open-mode=append\n")),
    ("KS506", "error", one("python train.py", "#SBATCH --signal=USR2@60\n")),
    ("KS506", "warning", two("srun torchrun --nnodes=2 --rdzv_backend=c10d t.py", "#SBATCH --signal=USR2@60\n")),
    ("KS506", "warning", one("srun accelerate launch t.py", "#SBATCH --signal=USR1@60\n")),
    ("KS510", "warning", one("python train.py\nscancel ${SLURM_JOBID}")),
    ("KS417", "warning", two("srun torchrun --nnodes=2 --rdzv_backend=c10d --rdzv_endpoint=worker-0.local:$P t.py")),
    ("KS417", "warning", two("export MASTER_ADDR=10.1.2.3\nsrun -K python train.py")),
    ("KS401", "error", two("srun torchrun --nnodes=2 --node_rank=0 --master_addr=$H train.py")),
    ("KS401", "error", two("srun accelerate launch --machine_rank 0 --main_process_ip $H train.py")),
    ("KS401", "error", two("export RANK=$SLURM_PROCID\nsrun -K python train.py")),
    ("KS401", "error", two("RANK=$SLURM_PROCID srun -K python train.py")),
    ("KS401", "error", two("srun -K --export=ALL,RANK=$SLURM_PROCID python train.py")),
    ("KS401", "error", two("srun -K env LOCAL_RANK=$SLURM_LOCALID python train.py")),
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
    ("KS204", "info", option("--output=%A_%a.out")),
    ("KS306", "warning", option("--nodes=2 --gpus=16 -c 8")),
    ("KS307", "warning", option("--nodes=1 --ntasks-per-node=8 --gpus-per-task=1 -c 8")),
    (
        "KS402",
        "warning",
        two("srun bash -c 'torchrun --node_rank=$SLURM_PROCID t.py'", "#SBATCH --ntasks-per-node=8\n"),
    ),
    ("KS405", "warning", two("A=$(hostname --ip-address)\nsrun -K python train.py $A")),
    ("KS405", "warning", two("hostname -I\nsrun -K python train.py")),
    ("KS410", "warning", one("srun -n1 python train.py")),
    ("KS412", "info", two(f"srun bash -c 'torchrun {C10D} --rdzv_endpoint=$H:$P --node_rank=$SLURM_NODEID t.py'")),
    ("KS414", "warning", one("conda activate train\npython train.py")),
    ("KS414", "warning", one("source activate train\npython train.py")),
    ("KS504", "warning", one("srun -n1 python a.py\nsrun -n1 python b.py", set_="")),
    ("KS507", "warning", one("srun -n1 python train.py", "#SBATCH --signal=USR1@60\n")),
    ("KS509", "warning", one('apptainer exec a.sif bash -c "scontrol show hostnames; python a.py"')),
    ("KS509", "warning", one("srun -n1 --container-image=a.sqsh scontrol show hostnames")),
    ("KS603", "warning", one("set -x\nexport HF_TOKEN=$(cat ~/.hf)\npython train.py")),
    ("KS607", "info", one("torchrun --standalone --nproc_per_node=8 train.py")),
    ("KS610", "warning", one("scontrol show hostnames > ./hostfile\ndeepspeed --hostfile hostfile train.py")),
]

C10D_LAUNCH = "--rdzv_backend=c10d --rdzv_id=$SLURM_JOB_ID --rdzv_endpoint=$head:$MASTER_PORT"
SRUN = "srun --kill-on-bad-exit=1 python"
TORCHRUN = "torchrun --standalone --nproc_per_node=8"

# A rule, a script without findings, and a change after which this rule finds something, and no other does.
MUTANTS = [
    ("KS101", ONE_NODE, "--nodes=1", "\u2013nodes=1"),
    ("KS101", ONE_NODE, "--lr", "\u2013lr"),
    ("KS102", ONE_NODE, "set -euo pipefail", "set -euo pipefail\n#SBATCH --mem=0"),
    ("KS103", ONE_NODE, "#SBATCH --job-name", "#SABTCH --job-name"),
    ("KS103", ONE_NODE, "#SBATCH --job-name", "# SBATCH --job-name"),
    ("KS104", ONE_NODE, "#!/bin/bash", "# Copyright\n#!/bin/bash"),
    ("KS105", ONE_NODE, "\n", "\r\n"),
    ("KS106", ONE_NODE, "--job-name=tune", "--job-name=$NAME"),
    ("KS107", ONE_NODE, "--job-name=tune", "--account=<account>"),
    ("KS108", ONE_NODE, "--cpus-per-task", "--cpu-per-tasks=1\n#SBATCH --cpus-per-task"),
    ("KS108", ONE_NODE, "--time=2:00:00", "--time=2h --time-min=1:00:00"),
    ("KS108", ONE_NODE, "--job-name=tune", "--segment=1"),
    ("KS109", ONE_NODE, "--job-name=tune", "--mem=64G --mem-per-gpu=8G"),
    ("KS110", ONE_NODE, "--job-name=tune", "--cpus-per-task=8"),
    ("KS111", ONE_NODE, "3e-4", "'3e-4"),
    ("KS201", ONE_NODE, "tune-%j", "no_such_folder/tune-%j"),
    ("KS202", ONE_NODE, "tune-%j", "tune"),
    ("KS203", GOOD, "#SBATCH --open-mode=append\n", ""),
    ("KS204", ONE_NODE, "tune-%j", "tune-%j-%a"),
    ("KS301", ONE_NODE, "#SBATCH --time=2:00:00\n", ""),
    ("KS302", ONE_NODE, "--nproc_per_node=8", "--nproc_per_node=16"),
    ("KS303", GOOD, "--ntasks-per-node=1", "--ntasks-per-node=8"),
    ("KS304", GOOD, "srun --ntasks-per-node=1 --kill-on-bad-exit=1 bash", "bash"),
    ("KS305", ONE_NODE, "--nodes=1", "--ntasks=8"),
    ("KS306", STEPS, "--gres=gpu:8", "--gpus=16"),
    ("KS307", STEPS, "--gres=gpu:8", "--gpus-per-task=1"),
    ("KS308", ONE_NODE, "OMP_NUM_THREADS=8", "OMP_NUM_THREADS=8 CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7"),
    ("KS309", ONE_NODE, "#SBATCH --cpus-per-task=64\n", ""),
    ("KS401", GOOD, '"$SLURM_NODEID"', "'$SLURM_NODEID'"),
    ("KS402", STEPS, SRUN, "srun bash -c 'torchrun --nproc_per_node=1 --node_rank=$SLURM_PROCID train.py' #"),
    ("KS403", STEPS, "MASTER_ADDR=$head", "MASTER_ADDR=$SLURM_JOB_NODELIST"),
    ("KS404", STEPS, "MASTER_ADDR=$head", "MASTER_ADDR=localhost"),
    ("KS405", STEPS, "MASTER_ADDR=$head", 'MASTER_ADDR=$(srun -N1 -n1 -w "$head" hostname -I)'),
    ("KS406", STEPS, "MASTER_PORT=$((20000 + SLURM_JOB_ID % 12000))", "MASTER_PORT=29500"),
    ("KS407", STEPS, "MASTER_PORT=$((20000 + SLURM_JOB_ID % 12000))", "MASTER_PORT=$(shuf -i 0-65535 -n 1)"),
    ("KS408", STEPS, SRUN, f"srun torchrun {C10D_LAUNCH.replace('$SLURM_JOB_ID', '101')}"),
    ("KS409", STEPS, "exit=1 python", "exit=1 LR=3 python"),
    ("KS410", STEPS, " SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK", ""),
    ("KS411", STEPS, "SLURM_JOB_NODELIST", "SLURM_JOB_NODELIS"),
    ("KS412", STEPS, SRUN, f"srun bash -c 'torchrun --node_rank=$SLURM_PROCID {C10D_LAUNCH} train.py' #"),
    ("KS413", ONE_NODE, "torchrun --standalone", "torchrun --standalone --rdzv_endpoint=$ADDRESS"),
    ("KS413", STEPS, SRUN, "srun torchrun --standalone"),
    ("KS414", ONE_NODE, "\ntorchrun", "conda activate tune\ntorchrun"),
    ("KS415", ONE_NODE, "OMP_NUM_THREADS=8", "OMP_NUM_THREADS=8 NCCL_ASYNC_ERROR_HANDLING=1"),
    ("KS416", STEPS, "--kill-on-bad-exit=1 ", ""),
    ("KS501", ONE_NODE.replace("set -euo pipefail\n", ""), "3e-4", "3e-4\necho done"),
    ("KS502", ONE_NODE.replace("set -euo pipefail\n", "set -e\n"), "3e-4", "3e-4 2>&1 | tee log"),
    ("KS503", ONE_NODE, "3e-4", "3e-4 &"),
    ("KS503", ONE_NODE, "3e-4", "3e-4 &\nwait"),
    ("KS504", ONE_NODE.replace("set -euo pipefail\n", ""), "\ntorchrun", "python prepare.py\ntorchrun"),
    ("KS505", ONE_NODE, "--time=2:00:00", "--time=20:00:00"),
    ("KS506", GOOD, "TERM@300", "B:TERM@300"),
    ("KS417", STEPS, "MASTER_ADDR=$head", "MASTER_ADDR=node17"),
    ("KS510", ONE_NODE, "3e-4", "3e-4\nscancel $SLURM_JOB_ID"),
    ("KS507", STEPS, "--time=2:00:00", "--time=2:00:00 --signal=USR1@300"),
    ("KS508", ARRAY, "3e-4", "3e-4 || scontrol requeue $SLURM_JOB_ID"),
    ("KS509", ONE_NODE, "\ntorchrun", 'apptainer exec a.sif bash -c "scontrol show hostnames"\ntorchrun'),
    ("KS601", ONE_NODE, "OMP_NUM_THREADS=8", f"OMP_NUM_THREADS=8 HF_TOKEN={TOKEN}"),
    ("KS602", ONE_NODE, "3e-4", "3e-4 --token $HF_TOKEN"),
    ("KS603", ONE_NODE, "export PYTHON", "set -x\nexport HF_TOKEN=$(cat ~/.hf) PYTHON"),
    ("KS604", ONE_NODE, "OMP_NUM_THREADS=8", "OMP_NUM_THREADS=8 NCCL_P2P_DISABLE=1"),
    ("KS605", ONE_NODE, "OMP_NUM_THREADS=8", "OMP_NUM_THREADS=8 CUDA_LAUNCH_BLOCKING=1"),
    ("KS606", ONE_NODE, "\ntorchrun", "pip install -U trl\ntorchrun"),
    ("KS607", ONE_NODE, " OMP_NUM_THREADS=8", ""),
    ("KS609", STEPS, "PYTHONUNBUFFERED=1 ", ""),
    ("KS610", ONE_NODE, "\ntorchrun", "scontrol show hostnames > hostfile\ntorchrun"),
]


LOOP = (
    'for i in 0 1; do srun -N1 -n1 -w "${n[$i]}" torchrun --nnodes=2 --node_rank=$i t.py & p+=($!); done\nwait ${p[@]}'
)
UNROLLED = "\n".join(f"srun -N1 -n1 -r{n} torchrun --nnodes=2 --node_rank={n} t.py & p{n}=$!" for n in (0, 1))

# A rule, and a correct script that resembles its fault.
CORRECT = [
    *(
        ("KS502", one(f"srun -n1 {probe} | head\npython train.py", set_="set -e\n"))
        for probe in (
            "lscpu",
            "free -g",
            "nvidia-smi -L",
            "python --version",
            "python -c 'print(1)'",
            "df -h",
            "nvcc -V",
        )
    ),
    ("KS302", two(LOOP)),
    ("KS302", two(f"{UNROLLED}\nwait $p0 && wait $p1")),
    ("KS501", one("python train.py\nexit", set_="")),
    ("KS107", option("--constraint=[type_b]")),
    ("KS107", option('--constraint="[rack1|rack2]"')),
    ("KS107", option("--job-name=todo-list --output=your-turn-%j.out")),
    ("KS107", option("--partition=yourcenter --account=todos")),
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
    ("KS506", one("srun -n1 torchrun --signals-to-handle=SIGUSR2 t.py", "#SBATCH --signal=USR2@60\n")),
    ("KS506", one("srun -n1 torchrun t.py", "#SBATCH --signal=TERM@60\n")),
    ("KS506", one("./train.sh", "#SBATCH --signal=USR2@60\n")),
    ("KS510", one("scancel $OTHER\nscancel --signal=USR1 $SLURM_JOB_ID\npython train.py")),
    ("KS417", two(ADDRESS + "export MASTER_ADDR=$head\nsrun python train.py", "#SBATCH -w node[1-2]\n")),
    ("KS401", two("srun bash -c 'export RANK=$SLURM_PROCID; python train.py'")),
    ("KS401", two("srun bash -c 'RANK=$SLURM_PROCID python train.py'")),
    ("KS401", one("export RANK=$SLURM_PROCID\nsrun -n1 python train.py")),
    ("KS506", one("exec srun -n1 python train.py", "#SBATCH --signal=B:USR1@60\n")),
    ("KS508", one("python a.py || scontrol requeue $SLURM_JOB_ID")),
    ("KS601", one("git checkout 0123456789abcdef0123456789abcdef01234567\nexport HF_TOKEN=$(cat ~/.hf)")),
    ("KS601", one("export HF_TOKEN=hf_xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx")),
    ("KS602", one('export HF_TOKEN\n[ -n "$HF_TOKEN" ]\npython t.py --tokenizer $TOKENIZER --n $NUM_TOKENS')),
    ("KS602", one("srun --export=ALL,HF_TOKEN python train.py")),
    ("KS606", one("git rev-parse HEAD\npip list\npython train.py")),
    ("KS609", one("python -u train.py", set_="set -e\n")),
    ("KS204", option("--array=0-3 --output=%A_%a.out")),
    ("KS306", option("--nodes=1 --gpus=8 -c 8")),
    ("KS307", option("--nodes=1 --ntasks-per-node=8 --gpus-per-task=1 --gpu-bind=none -c 8")),
    ("KS402", two("srun bash -c 'torchrun --node_rank=$SLURM_PROCID train.py'", "#SBATCH --ntasks-per-node=1\n")),
    ("KS410", one("export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK\nsrun -n1 python train.py")),
    ("KS410", one("srun -n1 --cpus-per-task=8 python train.py")),
    ("KS414", one('source "$(conda info --base)/etc/profile.d/conda.sh"\nconda activate train\npython train.py')),
    ("KS414", one('eval "$(conda shell.bash hook)"\nconda activate train\npython train.py')),
    ("KS414", one("source venv/bin/activate\npython train.py")),
    ("KS504", one("srun -n1 python a.py || exit 1\nsrun -n1 python b.py", set_="")),
    ("KS504", one("srun -n1 python a.py\n[ $? -eq 0 ] || exit 1\nsrun -n1 python b.py", set_="")),
    ("KS509", one("head=$(scontrol show hostnames | head -n 1)\napptainer exec a.sif python train.py $head")),
    ("KS509", two(ADDRESS + 'srun -K --container-image=a bash -c "python train.py --head $head"')),
    ("KS603", one("set -x\nset +x\nexport HF_TOKEN=$(cat ~/.hf)\npython train.py")),
    ("KS610", one("scontrol show hostnames > hostfile_$SLURM_JOB_ID\npython train.py")),
]


# Scripts written for this test, with the faults of published recipes.
PUBLISHED = [
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
