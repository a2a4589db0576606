#!/bin/bash
# Records how a user's own job script starts and ends, without changing the script: bash reads this file before it
# (BASH_ENV). The keys of the records are in kit/slurm/states.py, the variables KIT_* in kit/slurm/variables.py.
# A trap on EXIT that the script itself sets takes the place of the one that is set here.

case $0 in */slurm_script | */job.sbatch)  # not in the shells that the script starts
  unset BASH_ENV
  if [ -n "${KIT_SUBMISSION:-}" ] && [ -r "$KIT_RUN/run.json" ] && ! grep -qF "\"$KIT_SUBMISSION\"" "$KIT_RUN/run.json"; then
    echo "$KIT_RUN was submitted again after this job, which therefore ends without having done anything." >&2
    exit 1
  fi
  _kit_task=${SLURM_ARRAY_TASK_ID:+.$SLURM_ARRAY_TASK_ID}

  # _kit_record NAME KEYS: writes state/NAME.<restart>[.<task>].json, completely or not at all.
  _kit_record() {
    local file=$1.${SLURM_RESTART_COUNT:-0}$_kit_task.json job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}
    printf '{"version": 1, "job_id": "%s", "time": %(%s)T, %s}\n' "${KIT_JOB_ID:-$job}" -1 "$2" \
      > "$KIT_RUN/state/.$file" && mv "$KIT_RUN/state/.$file" "$KIT_RUN/state/$file"
  } 2> /dev/null

  trap '_kit_record exit "\"exit_code\": $?"' EXIT
  _kit_record start "\"nodes\": \"$SLURM_JOB_NODELIST\", \"log_bytes\": $(stat -Lc %s /proc/$$/fd/1)"

  # The heartbeat ends with the script's shell.
  (while kill -0 $$; do touch "$KIT_RUN/state/heartbeat$_kit_task"; sleep 10; done &) < /dev/null > /dev/null 2>&1
esac
