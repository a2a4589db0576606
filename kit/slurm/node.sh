# On each node: check that it has what the job needs, start the sampler, then meet the other nodes and start the ranks.
# {{python_path}}
lacks() {
  echo "[start on ${SLURMD_NODENAME:-$HOSTNAME}] $1 is not here: $2 of the cluster profile."
  exit 41
}
[ -d "$KIT_RUN/state" ] || lacks "$KIT_RUN" "every node must see paths.runs"
python='{{python}}'
command -v "$python" > /dev/null || lacks "$python" "set slurm.python, or the lines of slurm.setup,"
"$python" -m kit.train.sampler "$KIT_RUN" --parent $$ &
exec "$python" -m kit.slurm.rendezvous "$KIT_RUN" '{{launcher}}'
