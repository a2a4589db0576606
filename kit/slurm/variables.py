"""The KIT_* environment variables: every one that the package reads or sets, in Python or in the job scripts.

Outside of the package there are three more: KIT_SHARED (tests: the folder of shared test data), KIT_TRAINERS (tests:
the folder of environments of other trainers, env/trainers) and KIT_WHEELHOUSE (env/setup: the folder that packages are
installed from).
"""

from enum import StrEnum


class Variable(StrEnum):
    """Names of environment variables; a test compares them with the job scripts."""

    RUN = "KIT_RUN"  # the run folder, as the nodes see it; set by the job script, or by submit for a user's own script
    PYTHON = "KIT_PYTHON"  # the interpreter outside of a container; set by the job script
    JOB_ID = "KIT_JOB_ID"  # the job id that start and exit records carry; set by the local runner, else SLURM_JOB_ID
    HOSTS = "KIT_HOSTS"  # the job's node names, separated by spaces, in the order of SLURM_NODEID; set by the script
    ADDRESS = "KIT_ADDRESS"  # the head node's address (NodeAddr); set by the job script
    SOFTWARE = "KIT_SOFTWARE"  # JSON: versions at the launch, which the nodes must have; set by the job script
    KEY = "KIT_KEY"  # 32 random bytes in hex, of this start of the job; only the tasks of the training step have it
    SUBMISSION = "KIT_SUBMISSION"  # of the last `sbatch` of the run, also in run.json; set by submit
    RENDEZVOUS = "KIT_RENDEZVOUS"  # init_method of torch.distributed for the processes that time checkpoints
