"""How many ranks saved a checkpoint, and on how many training can resume from it."""

from dataclasses import asdict, dataclass
from pathlib import Path

from kit import files
from kit.errors import InputError
from kit.show import count

RECORD = "saved_by.json"


@dataclass(frozen=True)
class SavedBy:
    """What a checkpoint says of the ranks that saved it. rows: of an optimizer step, over all ranks.

    reshards: whether any number of ranks can load weights and optimizer, as those of FSDP2.
    """

    ranks: int
    rows: int
    reshards: bool

    @classmethod
    def read(cls, checkpoint: Path) -> "SavedBy | None":
        """The record of a checkpoint; None for checkpoints of older releases, and where it is damaged."""
        try:
            found = cls(**files.read_json(checkpoint / RECORD))
        except (InputError, OSError, TypeError):
            return None
        return found if isinstance(found.ranks, int) and isinstance(found.rows, int) else None

    def write(self, checkpoint: Path) -> None:
        """Write the record into the folder of a checkpoint, which is made where it is missing."""
        checkpoint.mkdir(parents=True, exist_ok=True)
        files.write_json(checkpoint / RECORD, asdict(self))

    def resumes_on(self) -> str:
        """On how many ranks training can resume. Steps of other sizes would train on other rows."""
        if self.reshards:
            return f"any number of ranks, with {self.rows} rows in an optimizer step"
        return count(self.ranks, "rank")
