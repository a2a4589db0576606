# Export the NAME=VALUE lines of the token file. Nothing of it is printed, not even a line of another form.
if [[ $(stat -Lc %a '{{file}}') != *00 ]]; then
  reason="others can read the token file (slurm.env_file): chmod 600 it"
  echo "$reason" >&2
  exit 1
fi
while read -r line || [[ -n $line ]]; do
  line=${line#export } value=${line#*=} value=${value#[\"\']} value=${value%[\"\']}
  if [[ $line =~ ^[A-Za-z_][A-Za-z0-9_]*= ]]; then export "${BASH_REMATCH[0]}$value"; fi
done < '{{file}}'

