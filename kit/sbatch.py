"""The job script and its accelerate config: exactly what is submitted, written into the run folder."""

import os
import re
import shlex
import sys
from pathlib import Path

from kit.cluster import Cluster
from kit.recipe import Recipe
from kit.run import Run

# Runs on each node. SLURM_NODEID must be read there: on the batch host it is 0 for every node.
NODE_COMMAND = """
"$KIT_PYTHON" -m kit.sampler "$KIT_RUN" &
exec "$KIT_PYTHON" -m accelerate.commands.launch --config_file "$KIT_RUN/accelerate.yaml" \\
  --machine_rank "$SLURM_NODEID" --main_process_ip "$KIT_ADDRESS" --main_process_port "$KIT_PORT" \\
  -m kit.train "$KIT_RUN"
"""

BODY = """\
set -euo pipefail

export KIT_RUN={run}
export KIT_PYTHON={python}
{environment}
restart=${{SLURM_RESTART_COUNT:-0}}
: "${{KIT_JOB_ID:=$SLURM_JOB_ID}}"  # the local runner has ids of its own

# Evidence of how the job ended, whole or absent: accounting may be off and nobody may be watching.
record() {{  # NAME FACTS: state/NAME.<restart>.json
  local file=$1.$restart.json
  printf '{{"job_id": "%s", "time": %s, %s}}\\n' "$KIT_JOB_ID" "$(date +%s)" "$2" > "$KIT_RUN/state/.$file"
  mv "$KIT_RUN/state/.$file" "$KIT_RUN/state/$file"
}}
finish() {{
  rc=$?
  kill "$heart" 2>/dev/null || true
  record exit "\\"exit_code\\": $rc, \\"signal\\": \\"$caught\\""
}}
caught="" step="" heart=""
trap finish EXIT
stop() {{ caught=$1; [ -z "$step" ] || kill -TERM "$step" 2>/dev/null || true; }}
trap 'stop TERM' TERM
trap 'stop INT' INT
while sleep 10; do date +%s > "$KIT_RUN/state/heartbeat"; done &
heart=$!
record start "\\"nodes\\": \\"$SLURM_JOB_NODELIST\\""

{setup}# The head node's address comes from Slurm: node names need not resolve, and localhost would split the job.
read -r head < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
KIT_ADDRESS=$(scontrol show node "$head" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')
[ -n "$KIT_ADDRESS" ] || {{ echo "scontrol show node gives no NodeAddr for the head node $head." >&2; exit 1; }}
KIT_PORT=$((20000 + SLURM_JOB_ID % 12000))  # below the range of outgoing connections, another for each job
export KIT_ADDRESS KIT_PORT
export SRUN_CPUS_PER_TASK=${{SLURM_CPUS_PER_TASK:-1}}  # Slurm 22.05 and 23.02 do not hand it to srun

srun --ntasks-per-node=1 --kill-on-bad-exit=1 bash -c {node_command} &
step=$!
rc=0
wait "$step" || rc=$?
while kill -0 "$step" 2>/dev/null; do  # a trap interrupts wait; the step may still be saving
  rc=0
  wait "$step" || rc=$?
done
if [ "$rc" -ne 0 ]; then
  "$KIT_PYTHON" -m kit.evidence "$KIT_RUN" "$rc" || rc=$?  # names the dead rank; its exit code becomes the job's
fi
exit "$rc"
"""


def render_script(run: Run) -> str:
    """The sbatch script of a run. One srun task a node; accelerate starts the ranks."""
    recipe, cluster = run.recipe, run.cluster
    directives = "".join(f"#SBATCH {line}\n" for line in _directives(recipe, cluster, run.path))
    lines = "".join(f"{line}\n" for line in cluster.slurm.setup)
    setup = f"set +u  # module and conda scripts read unset variables\n{lines}set -u\n\n" if lines else ""
    return f"#!/bin/bash\n{directives}" + BODY.format(
        run=shlex.quote(str(run.path)),
        python=shlex.quote(sys.executable),
        environment="\n".join(f"export {k}={shlex.quote(v)}" for k, v in _environment(run).items()),
        setup=setup,
        node_command=shlex.quote(NODE_COMMAND),
    )


def _directives(recipe: Recipe, cluster: Cluster, path: Path) -> list[str]:
    parallel, slurm = recipe.parallel, cluster.slurm
    share = min(1.0, parallel.gpus_per_node / cluster.nodes.gpus) if cluster.nodes.gpus else 1.0
    lines = [
        f"--job-name={recipe.name}",
        f"--nodes={parallel.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={max(1, int(cluster.nodes.cpus * share))}",
        f'--output="{path}/logs/slurm-%j.out"',
        "--open-mode=append",
        "--requeue",
    ]
    if cluster.nodes.gpus and slurm.gres:
        lines.append(f"--gres={re.sub(r':[0-9]+$', '', slurm.gres)}:{parallel.gpus_per_node}")
    lines += ["--exclusive", "--mem=0"] if cluster.nodes.gpus and share == 1 else []
    for option, value in (("partition", slurm.partition), ("time", slurm.time), ("account", slurm.account)):
        lines += [f"--{option}={value}"] if value else []
    return lines + list(slurm.options)


def _environment(run: Run) -> dict[str, str]:
    """What every process of the job sees; the cluster's own settings win."""
    info = run.info
    values = {
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "WANDB_MODE": os.environ.get("WANDB_MODE", "offline"),
        "WANDB_PROJECT": run.recipe.name,
        "WANDB_DIR": str(run.path),
        "WANDB_RUN_ID": info["wandb_id"],
        "WANDB_RESUME": "allow",
        "WANDB_SILENT": "true",
        "WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL": "1",  # default 15 s, and a killed run would leave nothing
        "WANDB_X_STATS_SAMPLING_INTERVAL": "2",
        "HF_HUB_OFFLINE": "1",  # what the job needs was found at launch; compute nodes may have no network
    }
    if run.cluster.paths.hf_home:
        values["HF_HOME"] = run.cluster.paths.hf_home
    if run.cluster.nodes.gpus == 0:
        threads = max(1, run.cluster.nodes.cpus // run.recipe.parallel.gpus_per_node)
        values |= {"OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}
    return values | run.cluster.environment


def render_accelerate(recipe: Recipe, cluster: Cluster) -> str:
    """accelerate's config as YAML. CPU ranks go the way of GPU ranks; kit.train switches FSDP on for them."""
    parallel, gpus = recipe.parallel, cluster.nodes.gpus > 0
    sharded = parallel.strategy in ("fsdp1", "fsdp2") and (gpus or recipe.world_size > 1)
    kind = "FSDP" if sharded else "MULTI_GPU" if recipe.world_size > 1 else "'NO'"
    lines = [
        "compute_environment: LOCAL_MACHINE",
        f"distributed_type: {kind}",
        f"mixed_precision: {'bf16' if gpus else chr(39) + 'no' + chr(39)}",
        f"num_machines: {parallel.nodes}",
        f"num_processes: {recipe.world_size}",
        "rdzv_backend: static",
        "same_network: true",
        f"use_cpu: {'false' if gpus else 'true'}",
    ]
    return "\n".join([*lines, *(_fsdp(recipe, gpus) if sharded else [])]) + "\n"


def _fsdp(recipe: Recipe, gpus: bool) -> list[str]:
    parallel = recipe.parallel
    values: dict[str, object] = {
        "fsdp_version": 2 if parallel.strategy == "fsdp2" else 1,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_activation_checkpointing": parallel.activation_checkpointing,
        "fsdp_offload_params": parallel.offload,
        "fsdp_cpu_ram_efficient_loading": gpus,  # rank 0 alone reads the weights
        "fsdp_sync_module_states": gpus,
    }
    if parallel.strategy == "fsdp2":
        values["fsdp_reshard_after_forward"] = parallel.sharding == "full"
    else:
        values["fsdp_sharding_strategy"] = {
            "full": "FULL_SHARD", "grad_op": "SHARD_GRAD_OP", "hybrid": "HYBRID_SHARD"
        }[parallel.sharding]  # fmt: skip
        values |= {"fsdp_backward_prefetch": "BACKWARD_PRE", "fsdp_use_orig_params": True}
    return ["fsdp_config:", *(f"  {k}: {str(v).lower() if isinstance(v, bool) else v}" for k, v in values.items())]
