"""States of runs that have ended for good, remembered so that thousands are listed without judging each again."""

from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter, ValidationError

from kit import files
from kit.errors import InputError
from kit.slurm import evidence
from kit.slurm.folder import RunFolder
from kit.slurm.outcome import RunState

MOST_RUNS = 50_000  # that are remembered; each takes about 500 bytes
_STATE = TypeAdapter(RunState)

Signature = list[list[int]]  # nanoseconds of the last change, and bytes, of each file that the state follows from


class EndedRuns:
    """States of runs, some of which this user's earlier processes have remembered in the kit's folder of states.

    A state is remembered once the run has ended and neither Slurm nor its accounting can have news of it, and holds
    while run.json, the ledger and the folder of start and exit files are as they were: a job that starts again writes
    there.
    """

    def __init__(self) -> None:
        self.path = files.state_home() / "ended.json"
        self._known = self._read()
        self._new: dict[str, Any] = {}

    def _read(self) -> dict[str, Any]:
        try:
            found = files.read_json(self.path)
        except (InputError, OSError):
            return {}
        return found if isinstance(found, dict) else {}

    def state_of(self, run: RunFolder) -> RunState:
        """The state now, as evidence.state_of."""
        signature = _signature(run)
        if signature and (state := self._remembered(run, signature)):
            return state
        state = evidence.state_of(run)
        if state.ended and signature == _signature(run) and evidence.is_settled(run):
            self._new[str(run.path)] = {"files": signature, "state": asdict(state)}
        return state

    def _remembered(self, run: RunFolder, signature: Signature) -> RunState | None:
        entry = self._known.get(str(run.path))
        if not isinstance(entry, dict) or entry.get("files") != signature:
            return None
        try:
            return _STATE.validate_python(entry.get("state"))
        except ValidationError:  # of another version of the kit
            return None

    def save(self) -> None:
        """Remember what is new. A folder that cannot be written costs time and nothing else."""
        if not self._new:
            return
        known = self._known | self._new
        newest = dict(list(known.items())[-MOST_RUNS:])
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            files.write_json(self.path, newest)
        except OSError:
            return
        self._known, self._new = newest, {}


def _signature(run: RunFolder) -> Signature | None:
    """None where one of the files is not there."""
    state = run.state_folder
    try:
        found = [path.stat() for path in (run.path / "run.json", state.path, state.ledger)]
    except OSError:
        return None
    return [[status.st_mtime_ns, status.st_size] for status in found]
