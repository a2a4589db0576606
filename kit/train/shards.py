"""The base model straight from its files into the shards of FSDP2: each byte is read once over all ranks.

The model is built without memory. accelerate shards it on the meta device, and then has the shards filled, which by
itself it does from a whole copy on rank 0. A rank reads its rows; where replicas hold the same rows, each reads a part
of them and sends it to the others.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed
from torch.distributed.tensor import DTensor

from kit.checkpoints.formats.base import Piece, Weights
from kit.checkpoints.sharded import Cut, empty, read_into, rows_of_rank
from kit.checkpoints.weights import pieces
from kit.train import patches
from kit.train.packed import PackedRows, PackedWeight, quantise_as_read
from kit.train.sources import Source


@dataclass
class Load:
    """How the base was loaded. bytes: of the base that all ranks have read; 0 where that is not known.

    from_checkpoint: the model is that of a checkpoint, from which training resumes.
    """

    seconds: float = 0.0
    bytes: int = 0
    from_checkpoint: bool = False

    def row(self) -> dict[str, float]:
        """What is logged."""
        row = {"base_load_s": self.seconds}
        if self.bytes:
            row |= {"base_load_gb": self.bytes / 1e9, "base_load_gb_s": self.bytes / 1e9 / max(1e-9, self.seconds)}
        return row


@dataclass
class ShardedBase:
    """A base model without memory, whose shards are filled from its files when accelerate prepares it.

    names: of the parameters, by the addresses of their placeholders, which stay alive so that the addresses are theirs.
    packed: the parameters that are quantised to nf4, by their names.
    """

    model: Any
    weights: Weights
    of: dict[str, list[Source]]
    reads: bool  # False: the shards will be filled from a checkpoint
    names: dict[int, str]
    placeholders: list[torch.Tensor]
    unused: str  # what the files hold and the model does not; empty: nothing
    packed: dict[str, PackedWeight] = field(default_factory=dict)
    load: Load = field(default_factory=Load)

    def attach(self, accelerator: Any) -> None:
        """Have accelerate fill the shards from here."""
        patches.fill_shards(accelerator.state.fsdp_plugin, self.fill)

    def fill(self, accelerator: Any, model: Any, state: dict[str, Any], cpu_offload: bool = False) -> Any:
        """Stands in for accelerate's fsdp2_load_full_state_dict: `model` is sharded on meta, `state` is as before."""
        begun, wanted = time.monotonic(), model.state_dict()
        own_device = "cpu" if accelerator.device.type == "cpu" else str(accelerator.device)
        device = "cpu" if cpu_offload else own_device
        part_of: dict[str, _Part] = {}
        filled = {}
        for name, like in wanted.items():
            base_name = self.names.get(state[name].data_ptr())
            if base_name is None:
                filled[name] = _own_rows(state[name], like, device)
                continue
            if base_name not in part_of:
                part_of[base_name] = _Part.of(like, device, share=not cpu_offload)
            filled[name] = part_of[base_name].local
        self._read(part_of, own_device)
        tensors = {name: _as_dtensor(filled[name], like, cpu_offload) for name, like in wanted.items()}
        model.load_state_dict(tensors, assign=True)
        self._report(accelerator, time.monotonic() - begun)
        return model

    def _read(self, part_of: dict[str, "_Part"], quantise_on: str) -> None:
        if not self.reads:
            for part in part_of.values():
                part.local.fill_(torch.nan)  # a weight that the checkpoint lacks would be seen at once
            return
        places, cuts, packed = pieces(self.weights), [], []
        for name, part in part_of.items():
            if name in self.packed:
                packed.append(part.packed_rows(self.packed[name], self.of[name], places))
            else:
                cuts += list(part.cuts(self.of[name], places))
        read_into(cuts)
        self.load.bytes = sum(cut.bytes for cut in cuts) + quantise_as_read(packed, quantise_on)
        for part in part_of.values():
            part.exchange()

    def _report(self, accelerator: Any, seconds: float) -> None:
        """Of all ranks: their bytes, and the seconds of the slowest one."""
        found = accelerator.gather(torch.tensor([[seconds, self.load.bytes]], device=accelerator.device)).cpu()
        self.load.seconds, self.load.bytes = float(found[:, 0].max()), int(found[:, 1].double().sum())


@dataclass(frozen=True)
class _Part:
    """This rank's rows of a parameter: memory for them, and which of them each of the replicas reads.

    group: of the replicas, where they send rows to each other. readers: of the ranks that read all rows together.
    """

    local: torch.Tensor
    held: range
    reads: list[range]
    group: Any
    readers: Any

    @classmethod
    def of(cls, like: DTensor, device: str, share: bool) -> "_Part":
        """The rows as FSDP2 shards `like`. share: whether replicas may send rows to each other."""
        mesh = like.device_mesh
        held = rows_of_rank(tuple(like.shape), mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1))
        local = empty((len(held), *like.shape[1:]), like.dtype, device)
        if mesh.ndim == 1 or not share:
            return cls(local, held, [held], None, mesh.get_group(mesh.ndim - 1))
        split = [rows_of_rank((len(held),), replica, mesh.size(0)) for replica in range(mesh.size(0))]
        return cls(local, held, [held[rows.start : rows.stop] for rows in split], mesh.get_group(0), None)

    @property
    def _own(self) -> range:
        """The rows that this rank reads."""
        return self.reads[distributed.get_rank(self.group) if self.group else 0]

    def packed_rows(self, weight: PackedWeight, sources: list[Source], places: dict[str, list[Piece]]) -> PackedRows:
        """The rows that this rank reads and quantises."""
        (source,) = sources
        (piece,) = places[source.name]
        return PackedRows(weight, piece, self._own, self._rows(self._own), self.readers)

    def cuts(self, sources: list[Source], places: dict[str, list[Piece]]) -> Iterator[Cut]:
        """The reads of this rank."""
        own = self._own
        for source in sources:
            (piece,) = places[source.name]
            if source.row is None:
                if own:
                    yield Cut(self._rows(own), piece, (own.start, *(0 for _ in piece.shape[1:])))
            elif source.row in own:
                expert = self.local[source.row - self.held.start]
                yield Cut(expert[source.start : source.start + piece.shape[0]], piece, (0,) * len(piece.shape))

    def exchange(self) -> None:
        """Send what this replica has read to the others, and receive theirs."""
        if self.group:
            for replica, rows in enumerate(self.reads):
                if rows:
                    distributed.broadcast(self._rows(rows), group=self.group, group_src=replica)

    def _rows(self, rows: range) -> torch.Tensor:
        return self.local[rows.start - self.held.start : rows.stop - self.held.start]


def _own_rows(tensor: torch.Tensor, like: Any, device: str) -> torch.Tensor:
    """This rank's rows of a tensor that all ranks have, such as an adapter's; all of a buffer, which is not sharded."""
    if not isinstance(like, DTensor):
        return tensor.to(device)
    mesh = like.device_mesh
    rows = rows_of_rank(tuple(like.shape), mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1))
    return tensor.detach()[rows.start : rows.stop].to(device, like.dtype, copy=True)


def _as_dtensor(local: torch.Tensor, like: Any, cpu_offload: bool) -> torch.Tensor:
    if not isinstance(like, DTensor):
        return local
    mesh, shape, stride = like.device_mesh, like.shape, like.stride()
    whole = DTensor.from_local(local, mesh, like.placements, run_check=False, shape=shape, stride=stride)
    return whole.to("cpu") if cpu_offload else whole  # from_local moves to the mesh's device
