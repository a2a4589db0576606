"""Why a job waits in the queue: Slurm's reason codes in words, and its estimate of the start."""

from kit.slurm import client
from kit.slurm.client import JobRow
from kit.slurm.folder import RunFolder
from kit.slurm.outcome import RunState
from kit.slurm.states import JobState

NODES_UNNAMED = "Nodes required for job are DOWN"  # ReqNodeNotAvail names the nodes, this reason does not
# Source: squeue(1), JOB REASON CODES. Several codes contain these names, such as QOSMaxWallDurationPerJobLimit, so the
# first that the code contains counts.
REASONS = {
    "None": "Slurm has not looked at it yet",
    "Priority": "jobs of higher priority go first",
    "Resources": "it is next, and waits until enough nodes, CPUs or GPUs are free",
    "DependencyNeverSatisfied": "the run that it follows did not end well: cancel it",
    "Dependency": "the run that it follows has not ended",
    "BeginTime": "its start time has not come; a requeued job waits two minutes",
    "JobHeldUser": "it is held: `scontrol release` it",
    "JobHeldAdmin": "an administrator holds it",
    "launch failed requeued held": "Slurm could not start it and holds it: `scontrol release` it",
    "JobArrayTaskLimit": "as many tasks of the array run as it allows",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved: see `sinfo -R`",
    NODES_UNNAMED: "nodes that it needs are down, drained or reserved: see `sinfo -R`",
    "PartitionDown": "the partition is closed",
    "PartitionTimeLimit": "it asks for more time than the partition gives: lower slurm.time and submit again",
    "PartitionNodeLimit": "it asks for more nodes than the partition gives: lower parallel.nodes and submit again",
    "QOS": "a limit of its QOS is reached",
    "Assoc": "a limit of its account is reached",
}


def why_pending(run: RunFolder, state: RunState) -> str:
    """Slurm's reason in words and its estimate of the start; empty for a job that does not wait in the queue."""
    if state.job_id is None or run.is_local or state.state.final:
        return ""
    rows = _rows_of(state.job_id, client.queue().rows)
    if not rows and state.state is JobState.PENDING:  # it is younger than the shared answer
        rows = _rows_of(state.job_id, client.squeue("-j", state.job_id).rows)
    waiting = [row for row in rows if row.job_state is JobState.PENDING]
    return _explain(waiting[0]) if waiting else ""


def _rows_of(job_id: str, rows: dict[str, JobRow]) -> list[JobRow]:
    return [row for row in rows.values() if row.array_job == job_id]


def _explain(row: JobRow) -> str:
    reason = row.said.reason or "None"
    words = next((text for code, text in REASONS.items() if code in reason), "see `man squeue`")
    if NODES_UNNAMED in reason:
        words += f"; now unavailable: {client.unavailable_nodes()}"
    start = "not known yet" if row.start == "N/A" else row.start
    return f"pending, reason {reason}: {words}; estimated start {start}"
