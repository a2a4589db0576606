# On each node: put in what only the node knows, and start the ranks.
set -- '{{launcher}}'
set -- "${@/#@NODE_RANK@/$SLURM_NODEID}"
set -- "${@/#@HEAD_ADDRESS@/$MASTER_ADDR}"
set -- "${@/#@HEAD_PORT@/$MASTER_PORT}"
exec '{{python}}' -m "$@"
