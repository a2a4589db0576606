"""Batch scripts in which the linter was wrong: reduced versions of public ones, written for these tests.

MISSED: a rule, a severity, and a script whose fault was not found. FALSE: a rule, and a correct script in which it
found a fault.
"""

from tests.lint.scripts import one, option, two

STATIC = "--nnodes=2 --master_addr=$H --master_port=$P"
BRANCHES = (
    'if [ "$NNODES" -gt 1 ]; then\n'
    f"  srun bash -c 'torchrun {STATIC} --node_rank=$SLURM_NODEID t.py'\n"
    "else\n"
    "  torchrun --nnodes=$NNODES --node_rank=${SLURM_NODEID:-0} t.py\n"
    "fi"
)

BACKGROUND = "srun -n1 python train.py &\np=$!\nwait $p\nwait $p"

MISSED = [
    # Code that a heredoc gives to a shell.
    ("KS401", "error", two(f"srun bash <<EOF\ntorchrun {STATIC} --node_rank=$SLURM_NODEID t.py\nEOF")),
    ("KS401", "error", two(f"cat <<EOF | srun bash\ntorchrun {STATIC} --node_rank=$SLURM_NODEID t.py\nEOF")),
    ("KS502", "error", one("bash <<'END' | tee log\npython train.py\nEND", set_="set -e\n")),
    ("KS502", "error", one("apptainer exec a.sif bash -s <<'END' 2>&1 | tee log\npython t.py\nEND", set_="set -e\n")),
    ("KS501", "error", one("bash <<< 'python train.py'\necho done", set_="")),
    ("KS501", "error", one("apptainer exec --nv a.sif bash <<END\ncd x\npython train.py\nexit\nEND\ndate", set_="")),
    ("KS501", "error", one("srun -n1 bash <<'END'\npython train.py\necho done\nEND")),
    ("KS501", "error", one("srun -n1 bash -c 'python train.py; date'")),
    ("KS304", "error", two("bash <<'END'\ntorchrun --nnodes=2 t.py\nEND")),
    ("KS502", "error", one("run() { torchrun --standalone $1; }\nrun t.py | tee log", set_="set -e\n")),
    ("KS510", "warning", one("python t.py\nscancel ${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}")),
    # An exit code that is looked at and forgotten.
    ("KS501", "warning", one("python train.py\nrc=$?\necho ended with $rc", set_="")),
    ("KS501", "warning", one('python train.py\nif [ $? -eq 0 ]; then echo "fine"; else echo "failed"; fi', set_="")),
    ("KS501", "warning", one("python a.py & p=$!\nwait $p || failed=1\necho failed=$failed")),
    # Signals, as tried in test_signals.py.
    ("KS506", "error", one("exec python train.py", "#SBATCH --signal=USR2@60\n")),
    ("KS506", "error", one("exec srun -n1 python train.py", "#SBATCH --signal=B:TERM@60\n")),
    ("KS506", "error", one(f"trap 'kill -TERM $p' TERM\n{BACKGROUND}", "#SBATCH --signal=B:TERM@60\n")),
    ("KS506", "error", one(f"trap 'kill $p' USR1\n{BACKGROUND}", "#SBATCH --signal=B:USR1@60\n")),
    ("KS506", "error", one(f"stop() {{ kill -s INT $p; }}\ntrap stop USR1\n{BACKGROUND}", "#SBATCH --signal=B:10@9\n")),
    (
        "KS506",
        "warning",
        one("srun -n1 bash -c 'python train.py; rc=$?; date; exit $rc'", "#SBATCH --signal=USR2@60\n"),
    ),
    # Values that are missing, and placeholders that are words.
    ("KS108", "error", "#!/bin/bash\n#SBATCH --nodes=  # how many\n#SBATCH --time=\nhostname\n"),
    ("KS107", "error", option("--account=project_xxxxxxxxx")),
    ("KS107", "error", option("--partition=PARTITION")),
    ("KS107", "error", option("--mail-user=user@example.com")),
    ("KS107", "error", option("--output=your_output_directory/%j.out")),
    ("KS107", "error", option("--chdir=/scratch/your_username/logs")),
    ("KS107", "error", option("--chdir=/path/to/project")),
    ("KS107", "error", option("--output=xxx/logs/%j.out")),
]

FALSE = [
    # A comment that shows how to submit the script.
    ("KS103", "#!/bin/bash\n# Submit: see below\n#   sbatch --nodes=4 train.sh a.yaml\n#SBATCH --time=10\nhostname\n"),
    ("KS103", "#!/bin/bash\n#sbatch -p gpu --reservation=lab train.sbatch  # example\n#SBATCH --time=10\nhostname\n"),
    ("KS103", "#!/bin/bash\n#   sbatch --export=ALL,N=2 \\\n#     train.sh\n#SBATCH --time=10\nhostname\n"),
    # sbatch takes it for --ntasks-per-node.
    ("KS108", option("--tasks-per-node=4 --nodes=2")),
    ("KS303", one("srun --tasks-per-node=1 torchrun --nproc_per_node=8 t.py", "#SBATCH --tasks-per-node=8\n")),
    ("KS107", option("--job-name=path-to-tokens --output=yourself/%j.out --account=maxx")),
    # The branch for one node, where the number of nodes is given at submission.
    ("KS401", "#!/bin/bash\n#SBATCH --time=10 -c 8 -w node3\nset -euo pipefail\nNNODES=$SLURM_NNODES\n" + BRANCHES),
    ("KS401", one("srun -n1 torchrun --node_rank=$SLURM_PROCID t.py").replace("--nodes=1", "--nodelist=node3")),
    # A server in the background that the script watches, asks or ends.
    ("KS503", one("python -m server &\nwhile true; do curl -sf $URL || exit 1; sleep 300; done")),
    ("KS503", one("python -m server &\np=$!\n./client\nkill $p")),
    ("KS503", one("python -m server &\nbash client.sh")),
    # The last command fails where there is no result.
    ("KS501", one("python merge.py --out all.bin\nls -l all.bin", set_="")),
    ("KS501", one("python merge.py --out all.bin\n[ -s all.bin ]", set_="")),
    ("KS501", one("finish() { exit $1; }\npython train.py\nfinish $?", set_="")),
    ("KS501", one("srun -n1 bash -ec 'python train.py; date'")),
    ("KS501", one("srun -n1 bash <<'END'\nset -e\npython train.py\necho done\nEND")),
    ("KS501", one("python train.py\nscancel $SLURM_JOB_ID", set_="")),
    ("KS501", one("python train.py\nscancel $SLURM_ARRAY_JOB_ID", set_="")),
    ("KS502", one("show() { squeue | head; }\nshow | tee log\npython train.py", set_="set -e\n")),
    ("KS601", one("export WANDB_API_KEY=YOUR_WANDB_API_KEY_HERE\npython train.py")),
    # A value that is continued on the next line.
    ("KS409", one("srun -n1 --container-mounts=\\\n$A,\\\n$B \\\n  python train.py")),
    # A command of another branch, and a wait in the same nested shell.
    ("KS501", one('if [ $1 = a ]; then\n  python train.py\nelse\n  echo "what is $1?"\nfi', set_="")),
    ("KS501", one("case $1 in\n  a) python train.py ;;\n  *) echo unknown ;;\nesac", set_="")),
    ("KS504", one("if a; then\n  python a.py\nelse\n  python b.py\nfi", set_="")),
    ("KS503", one("srun -n1 bash -c 'for i in 1 2; do python t.py $i & p+=($!); done; wait ${p[0]} && wait ${p[1]}'")),
    ("KS506", one(f"trap 'kill -USR1 $p' TERM\n{BACKGROUND}", "#SBATCH --signal=B:TERM@60\n")),
    ("KS506", one("exec srun -n1 python train.py", "#SBATCH --signal=USR2@60\n")),
    ("KS506", one("srun -n1 bash -c 'cd x; exec python train.py'", "#SBATCH --signal=USR2@60\n")),
    ("KS506", one("srun -n1 bash -c 'trap save USR2; python t.py & wait; date'", "#SBATCH --signal=USR2@60\n")),
    # Heredocs that no shell reads, or that a later shell reads well.
    ("KS502", one("cat <<'END' | tee notes\npython train.py\nEND", set_="set -e\n")),
    ("KS304", two("ssh $node <<'END'\ntorchrun --nnodes=2 t.py\nEND")),
    ("KS401", two(f"srun bash <<'END'\ntorchrun {STATIC} --node_rank=$SLURM_NODEID t.py\nEND")),
    ("KS401", two(f"srun bash <<END\ntorchrun {STATIC} --node_rank=\\$SLURM_NODEID t.py\nEND")),
]
