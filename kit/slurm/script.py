"""The job script and its accelerate config: exactly what is submitted, written into the run folder."""

import contextlib
import json
import math
import os
import shlex
import sys
from pathlib import Path

from kit.config.cluster import Cluster, gres_for
from kit.config.recipe import Recipe
from kit.errors import InputError
from kit.files import REPOSITORY, locate, read_json
from kit.forecast.timing import disk_rate, predict
from kit.slurm import environment as jobscript
from kit.slurm import rendezvous
from kit.slurm.run import Run

# On each node: prove that it has what the job needs, reaches the head and runs the same software, then become
# accelerate's launcher.
NODE_COMMAND = """
lacks() {{ echo "[start on ${{SLURMD_NODENAME:-$HOSTNAME}}] $1 is not here: $2 of the cluster profile."; exit 41; }}
[ -d "$KIT_RUN/state" ] || lacks "$KIT_RUN" "every node must see paths.runs"
command -v {python} > /dev/null || lacks {python} "set slurm.python, or the lines of slurm.setup,"
{python} -m kit.train.sampler "$KIT_RUN" &
exec {python} -m kit.slurm.rendezvous "$KIT_RUN"
"""

BODY = """\
set -euo pipefail

export KIT_RUN={run}
export KIT_PYTHON={python}
{environment}
restart=${{SLURM_RESTART_COUNT:-0}}
: "${{KIT_JOB_ID:=$SLURM_JOB_ID}}"  # the local runner has ids of its own

# Evidence of how the job ended, whole or absent: accounting may be off and nobody may be watching.
record() {{  # NAME FACTS: state/NAME.<restart>.json. Slurm's SIGTERM goes to every process, also to mv.
  local file=$KIT_RUN/state/$1.$restart.json
  printf '{{"job_id": "%s", "time": %(%s)T, %s}}\\n' "$KIT_JOB_ID" -1 "$2" > "$file.new"
  (trap '' TERM && exec mv "$file.new" "$file")
}}
leave() {{  # EXIT_CODE
  local why=${{reason//[^[:print:]]/ }}  # JSON holds neither a line's end nor a bare quote
  record exit "\\"exit_code\\": $1, \\"signal\\": \\"$caught\\", \\"reason\\": \\"${{why//[\\"\\\\]/}}\\""
}}
finish() {{ rc=$?; kill "$heart" 2>/dev/null || true; leave "$rc"; }}
caught="" step="" heart="" reason=""
rm -f "$KIT_RUN/state/stop" "$KIT_RUN/state/saved"
trap finish EXIT
stop() {{  # SIGNAL: KILL may follow before the step has ended, so this end is written down now
  caught=$1
  [ -n "$step" ] || exit 143
  leave 143
  kill -TERM "$step" 2>/dev/null || true
}}
trap 'stop TERM' TERM
trap 'stop INT' INT
# Slurm's warning. srun would hand it to every process of the step, accelerate's launcher among them, and end it: a file
# tells the ranks, which look at each step.
trap 'caught=USR2; : > "$KIT_RUN/state/stop"' USR2
while sleep 10; do date +%s > "$KIT_RUN/state/heartbeat"; done &
heart=$!
newest=$(ls "$KIT_RUN/checkpoints" | sed -n 's/^checkpoint-//p' | sort -n | tail -n 1)
record start "\\"nodes\\": \\"$SLURM_JOB_NODELIST\\", \\"checkpoint\\": \\"$newest\\""
if [ "$(grep -l "\\"checkpoint\\": \\"$newest\\"" "$KIT_RUN"/state/start.*.json | wc -l)" -gt 2 ]; then
  reason="no new checkpoint in three starts: save more often (schedule.save_every), or ask for more time"
  echo "$reason" >&2
  exit 1
fi

{tokens}{setup}# The head's address comes from Slurm: node names need not resolve, and localhost would split the job.
KIT_HOSTS=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | tr '\\n' ' ')
read -r head _ <<< "$KIT_HOSTS"
KIT_ADDRESS=$(scontrol show node "$head" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')
[ -n "$KIT_ADDRESS" ] || {{ echo "scontrol show node gives no NodeAddr for the head node $head." >&2; exit 1; }}
export KIT_HOSTS KIT_ADDRESS
export SRUN_CPUS_PER_TASK=${{SLURM_CPUS_PER_TASK:-1}}  # Slurm 22.05 and 23.02 do not hand it to srun

srun --ntasks-per-node=1 --kill-on-bad-exit=1 {container}bash -c {node_command} &
step=$!
while kill -0 "$step" 2>/dev/null; do wait "$step" || true; done  # a trap interrupts wait; the step may still be saving
rc=0
wait "$step" || rc=$?  # bash keeps the code of what has ended
# Preempted, or told to stop and saved: the same job starts again, unless somebody ends it. A task of an array is named,
# since the id of one of them is that of the whole array.
finished() {{ [ "$KIT_RUN/state/result.json" -nt "$KIT_RUN/state/start.$restart.json" ]; }}
step="" job=${{SLURM_ARRAY_JOB_ID:+${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID}}
job=${{job:-$SLURM_JOB_ID}}
now=$(scontrol show job -o "$job" || true)
saved=$(cat "$KIT_RUN/state/saved" 2>/dev/null || true)
case $caught$now in
  TERM* | INT*) why="ended from outside" ;;
  *" PreemptTime="[0-9]*) why="preempted" ;;
  USR2*) why="time limit near" ;;
  *) why="asked to stop" ;;
esac
if [ -n "$saved" ] || {{ [ "$why" = preempted ] && ! finished; }}; then
  rc=75  # EX_TEMPFAIL: to be tried again
  reason="$why${{saved:+, saved $saved}}"
  if [[ $why != *" from outside" && $why != "asked to stop" && $now == *" JobState=RUNNING "* ]]; then
    trap '' TERM  # which is what comes of it
    if said=$(scontrol requeue "$job" 2>&1); then
      reason+=", requeued"
    else
      reason+=", but Slurm does not start it again ($said): submit the run once more"
    fi
  fi
  echo "$reason"
  exit "$rc"
fi
if [ "$rc" -eq 0 ] && ! finished; then  # srun says 0 when a node fails
  rc=1 reason="the training step ended without a result"
elif [ "$rc" -ne 0 ]; then
  "$KIT_PYTHON" -m kit.slurm.outcome "$KIT_RUN" "$rc" || rc=$?  # names the dead rank; its exit code becomes the job's
fi
exit "$rc"
"""


def render_script(run: Run) -> str:
    """The sbatch script of a run. One srun task a node; accelerate starts the ranks."""
    return draft(run.recipe, run.cluster, run.path, Path(run.info["dataset"]), run.info["wandb_id"])


def draft(recipe: Recipe, cluster: Cluster, path: Path, dataset: Path, wandb_id: str) -> str:
    """The script of a run in the folder `path`, which need not be there yet."""
    slurm, contained = cluster.slurm, cluster.slurm.container.kind != "none"
    python = shlex.quote(slurm.python or ("python3" if contained else sys.executable))
    warning = f"--signal=B:USR2@{warning_s(recipe, cluster, dataset)}"
    directives = "".join(f"#SBATCH {line}\n" for line in [*_directives(recipe, cluster, path), warning, *slurm.options])
    environment = _environment(recipe, cluster, path, wandb_id)
    elsewhere = contained or slurm.python
    return f"#!/bin/bash\n{directives}" + BODY.format(
        run=shlex.quote(str(path)),
        python=jobscript.python(cluster),
        environment="\n".join(jobscript.exports(environment) + ([jobscript.PYTHONPATH] if elsewhere else [])),
        tokens=jobscript.tokens(cluster),
        setup=jobscript.setup(cluster),
        container=_container(recipe, cluster, [path.parent, dataset], list(environment)),
        node_command=shlex.quote(("\n" + jobscript.PYTHONPATH) * contained + NODE_COMMAND.format(python=python)),
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
        lines.append(f"--gres={gres_for(slurm.gres, parallel.gpus_per_node)}")
    lines += ["--exclusive", "--mem=0"] if cluster.nodes.gpus and share == 1 else []
    for option, value in (("partition", slurm.partition), ("time", slurm.time), ("account", slurm.account)):
        lines += [f"--{option}={value}"] if value else []
    return lines


def warning_s(recipe: Recipe, cluster: Cluster, dataset: Path) -> int:
    """Seconds before the time limit at which Slurm warns the job.

    Twice a step, an evaluation and a save, as forecast; at least 120, and at most half of the limit.
    """
    manifest, needed = dataset / "manifest.json", 0.0
    with contextlib.suppress(InputError):  # a family of models that the forecast does not know
        forecast = predict(recipe, cluster, read_json(manifest) if manifest.exists() else None)
        save = forecast.storage.checkpoint_gb * 1e9 / disk_rate(cluster, cluster.paths.runs)
        needed = 2 * ((forecast.time.step_range_s or (0, 0))[1] + (forecast.time.evaluation_s or 0) + save)
    return math.ceil(min(max(120.0, needed), cluster.slurm.limit_s / 2))


def _container(recipe: Recipe, cluster: Cluster, folders: list[Path], names: list[str]) -> str:
    """What stands between srun and the node's command. What the ranks read and write has the same path inside."""
    image, hf_home = cluster.slurm.container, cluster.paths.hf_home or os.environ.get("HF_HOME")
    folders = [*folders, REPOSITORY, Path(hf_home or "~/.cache/huggingface")]
    folders += [model] if (model := locate(recipe.model.name)).is_dir() else []
    mounts = dict.fromkeys([str(p.expanduser().absolute()) for p in folders] + list(image.mounts))
    pairs = [m if ":" in m else f"{m}:{m}" for m in mounts]
    words = {
        "none": [],
        # What the image sets itself would win over the job, but for what is named.
        "pyxis": [f"--container-image={image.image}", f"--container-mounts={','.join(pairs)}",
                  f"--container-env={','.join(names)}"],
        "apptainer": ["apptainer", "exec", "--nv", "--bind", ",".join(pairs), image.image],
    }[image.kind]  # fmt: skip
    return "".join(f"{shlex.quote(word)} " for word in words)


def _environment(recipe: Recipe, cluster: Cluster, path: Path, wandb_id: str) -> dict[str, str]:
    """What every process of the job sees; the cluster's own settings win."""
    values = {
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "WANDB_MODE": os.environ.get("WANDB_MODE", "offline"),
        "WANDB_PROJECT": recipe.name,
        "WANDB_DIR": str(path),
        "WANDB_RUN_ID": wandb_id,
        "WANDB_RESUME": "allow",
        "WANDB_SILENT": "true",
        "WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL": "1",  # default 15 s, and a killed run would leave nothing
        "WANDB_X_STATS_SAMPLING_INTERVAL": "2",
        "HF_HUB_OFFLINE": "1",  # what the job needs was found at launch; compute nodes may have no network
    }
    if cluster.slurm.container.kind == "none" and not cluster.slurm.python:
        values["KIT_SOFTWARE"] = json.dumps(rendezvous.software())  # what runs here: the nodes have to agree
    if cluster.paths.hf_home:
        values["HF_HOME"] = cluster.paths.hf_home
    if cluster.nodes.gpus == 0:
        threads = max(1, cluster.nodes.cpus // recipe.parallel.gpus_per_node)
        values |= {"OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}
    return values | cluster.environment


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
