"""Inspect a checkpoint: what it holds, what is wrong with it, and whether training can resume from it."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit import files
from kit.checkpoints.formats import dcp, zero
from kit.checkpoints.formats.base import HARMLESS, Problem, ProblemKind, TensorError, Weights, broken_link
from kit.checkpoints.formats.torch_archives import ArchiveError, record_sizes
from kit.checkpoints.saved_by import SavedBy
from kit.checkpoints.weights import read_headers, read_tensors
from kit.errors import InputError
from kit.show import Gigabytes, Part, Result, Table, count

COMPILED = "_orig_mod"  # what torch.compile puts into the names of a module that it wraps
TRAINER_STATE = "trainer_state.json"  # the Trainer writes it last: without it the save did not finish


@dataclass(frozen=True)
class Inspection(Result):
    """What a checkpoint holds and what is wrong with it.

    `bytes` are those of the tensors. Where `values_read` is False, nothing is known of the values: they may be NaN.
    `resumes_on` says on how many ranks training can resume; empty for a model or an adapter.
    """

    path: Path
    format: str
    tensors: int
    bytes: int
    ranks: int
    lora_tensors: int
    dtypes: dict[str, int]
    problems: tuple[Problem, ...]
    values_read: bool
    resumes_on: str = ""

    @property
    def kinds(self) -> frozenset[ProblemKind]:
        """The kinds of the problems."""
        return frozenset(problem.kind for problem in self.problems)

    @property
    def complete(self) -> bool:
        """True if training can resume from this checkpoint-N folder. Mode bits do not count."""
        return self.kinds <= HARMLESS and (self.path / TRAINER_STATE).is_file()

    @property
    def all_finite(self) -> bool | None:
        """True if no tensor holds NaN or infinity, None where the values were not read."""
        return ProblemKind.NOT_FINITE not in self.kinds if self.values_read else None

    def as_dict(self) -> dict[str, Any]:
        """The object that `kit checkpoint inspect --json` prints."""
        return super().as_dict() | {"problems": [problem.message for problem in self.problems]}

    def parts(self) -> Iterable[Part]:
        """A table of the contents, then one of the problems."""
        values = {None: "not read", True: "all finite", False: "not all finite"}[self.all_finite]
        dtypes = ", ".join(f"{count:,} {dtype}" for dtype, count in self.dtypes.items())
        columns = ("format", "tensors", "LoRA tensors", "dtypes", "size", "saved by ranks", "resumes on", "values")
        row = (
            self.format,
            self.tensors,
            self.lora_tensors,
            dtypes,
            Gigabytes(self.bytes / 1e9),
            self.ranks,
            self.resumes_on,
            values,
        )
        yield Table(columns, [row], title=str(self.path), marks={0: "bad"} if self.problems else {})
        if not self.problems:
            yield "No problems."
            return
        yield Table(("problem", "details"), [(problem.kind.value, problem.message) for problem in self.problems])


def inspect(path: Path, values: bool = False, world: int = 0) -> Inspection:
    """Describe a checkpoint and list its problems.

    `values` reads every tensor too and looks for NaN, infinity and an untrained adapter; this is skipped for files
    that cannot be read. `world` is the number of ranks that saved, 0 where it is not known.
    Raises InputError where there are no weights, KitError where files may not be read.
    """
    path = Path(path)
    weights = read_headers(path)
    problems = [*_resume_problems(path, weights, world), *_hidden_files(weights)]
    values_read = values and not weights.problems
    if values_read:
        try:
            problems += check_values(read_tensors(weights, weights.tensors))
        except TensorError as error:
            problems.append(error.problem)
            values_read = False
    return Inspection(
        path=path,
        format=weights.format,
        tensors=len(weights.tensors),
        bytes=weights.bytes,
        ranks=_saving_ranks(path, weights),
        lora_tensors=sum("lora_" in name for name in weights.tensors),
        dtypes=dict(Counter(tensor.dtype for tensor in weights.tensors.values())),
        problems=tuple(problems),
        values_read=values_read,
        resumes_on=_resumes_on(path, weights),
    )


def _saving_ranks(path: Path, weights: Weights) -> int:
    """The ranks that saved; of a sharded save without a record those that wrote a file, which may be fewer."""
    if saved := SavedBy.read(path):
        return saved.ranks
    if weights.format == zero.FORMAT:
        return len([file for file in weights.files if "optim_states" in file.name])
    return len({file.name.rpartition("_")[0] for file in weights.files}) if weights.format == "dcp" else 1


def _is_resumable(path: Path) -> bool:
    """Whether a folder is a checkpoint of training, not a model or an adapter."""
    return path.is_dir() and bool(re.fullmatch(r"checkpoint-\d+", path.name) or (path / TRAINER_STATE).exists())


def _resumes_on(path: Path, weights: Weights) -> str:
    if not _is_resumable(path):
        return ""
    saved = SavedBy.read(path)
    return saved.resumes_on() if saved else count(max(_random_states(path), _saving_ranks(path, weights)), "rank")


def _random_states(path: Path) -> int:
    return len(list(path.glob("rng_state*.pth")))


def check_values(tensors: Iterable[tuple[str, Any]]) -> list[Problem]:
    """Problems of kind NOT_FINITE and UNTRAINED, from (name, tensor) pairs that are read once."""
    not_finite, trained = [], []
    for name, tensor in tensors:
        if not _is_finite(tensor):
            not_finite.append(name)
        if "lora_B" in name or "lora_embedding_B" in name:
            trained.append(bool(tensor.any()))
    problems = []
    if not_finite:
        message = f"{len(not_finite)} tensors hold NaN or infinity: {', '.join(not_finite[:3])}."
        problems.append(Problem(ProblemKind.NOT_FINITE, message))
    if trained and not any(trained):
        message = "Every lora_B is zero: the adapter is untrained and changes nothing."
        problems.append(Problem(ProblemKind.UNTRAINED, message))
    return problems


def _is_finite(tensor: Any) -> bool:
    import torch

    if tensor.is_complex():
        return bool(torch.isfinite(torch.view_as_real(tensor).float()).all())
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor.float()).all())


def complete(path: Path, world: int = 0) -> bool:
    """True if training on `world` ranks (0: any number) can resume from this checkpoint-N folder.

    Raises KitError where files may not be read.
    """
    try:
        return inspect(path, world=world).complete
    except InputError:
        return False


def _resume_problems(path: Path, weights: Weights, world: int) -> Iterator[Problem]:
    """What makes a checkpoint unfit to load, or to resume from."""
    yield from weights.problems
    if not weights.tensors:
        yield Problem(ProblemKind.NO_TENSORS, f"{path} holds 0 tensors that can be read.")
    elif weights.format == "peft adapter" and not any("lora_" in name for name in weights.tensors):
        yield Problem(ProblemKind.NO_LORA, f"{path} holds no LoRA tensors.")
    if renamed := [name for name in weights.tensors if COMPILED in name.split(".")]:
        message = f"{len(renamed)} tensors of {path} have names of compiled modules, which no model has: {renamed[0]}."
        yield Problem(ProblemKind.COMPILED_NAMES, message)
    if not _is_resumable(path):
        return
    yield from _trainer_state_problems(path)
    yield from _optimizer_problems(path, weights)
    yield from _rank_problems(path, weights, world)
    yield from _file_problems(path)


def _rank_problems(path: Path, weights: Weights, world: int) -> Iterator[Problem]:
    """Ranks whose random state is missing, and a number of ranks on which training cannot resume."""
    states, saved = _random_states(path), SavedBy.read(path)
    ranks = saved.ranks if saved else world
    if not saved and weights.format == "dcp" and states >= _saving_ranks(path, weights):
        ranks = states
    if ranks and states < ranks:  # each rank writes its own and waits for no other
        message = f"{path} holds the random state of {states} of {ranks} ranks."
        yield Problem(ProblemKind.MISSING_RANKS, message)
    elif world and max(ranks, states) != world and not (saved and saved.reshards):
        by = count(max(ranks, states), "rank")
        message = f"{path} was saved by {by}, so training resumes from it on {by}, not on {world}."
        yield Problem(ProblemKind.OTHER_RANKS, message)


def _trainer_state_problems(path: Path) -> Iterator[Problem]:
    file = path / TRAINER_STATE
    if not file.is_file():
        yield Problem(ProblemKind.UNFINISHED_SAVE, f"{path} has no {TRAINER_STATE}: the save did not finish.")
        return
    try:
        state = files.read_json(file)
    except InputError as error:
        yield Problem(ProblemKind.DAMAGED_FILE, f"{file} is damaged ({error}).")
        return
    if not isinstance(state, dict):
        yield Problem(ProblemKind.DAMAGED_FILE, f"{file} is damaged (not a JSON object).")
        return
    step = state.get("global_step")
    if path.name.startswith("checkpoint-") and path.name != f"checkpoint-{step}":
        message = f"{file} is of step {step}: the folder holds two checkpoints."
        yield Problem(ProblemKind.MIXED_SAVES, message)


def _optimizer_problems(path: Path, weights: Weights) -> Iterator[Problem]:
    sharded = sorted(path.glob("optimizer_*/"))
    for folder in sharded:
        yield from dcp.read_headers([folder]).problems
    if (path / zero.LATEST).is_file():
        yield from () if weights.format == zero.FORMAT else zero.problems(path)
        return
    if not sharded and not any(path.rglob("*optim*")):
        message = f"{path} has no optimizer state; resumed training would restart its moments from zero."
        yield Problem(ProblemKind.NO_OPTIMIZER, message)


def _file_problems(path: Path) -> Iterator[Problem]:
    """Empty, truncated and broken files next to the weights."""
    for file in sorted(path.iterdir()):
        if file.is_symlink() and not file.exists():
            yield broken_link(file)
        elif not file.is_file():
            continue
        elif not file.stat().st_size:
            yield Problem(ProblemKind.EMPTY_FILE, f"{file} is empty.")
        elif file.suffix in (".pt", ".pth") and not _is_archive(file):
            yield Problem(ProblemKind.DAMAGED_FILE, f"{file} is truncated or not a file of torch.save.")


def _is_archive(file: Path) -> bool:
    with suppress(ArchiveError), file.open("rb") as stream:
        return bool(record_sizes(stream))
    return False


def _hidden_files(weights: Weights) -> Iterator[Problem]:
    group_read = 0o040
    if not files.umask_mode() & group_read:
        return
    for file in weights.files:
        mode = file.stat().st_mode
        if not mode & group_read:
            message = f"{file} has mode {mode & 0o777:04o}, so your group cannot read it; run chmod g+r."
            yield Problem(ProblemKind.HIDDEN_FROM_GROUP, message)
