"""4-bit weights of a sharded base: a rank quantises what it reads, tensor by tensor, and keeps its rows alone.

The numbers are those of quantising each tensor at once. A block of weights has one scale and is quantised by itself;
the scales of a tensor, which bitsandbytes quantises together, are gathered from all ranks first. Every rank keeps all
scales, one byte for 64 weights.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import distributed
from torch.nn import Linear, Parameter

from kit.checkpoints.formats.base import Piece
from kit.checkpoints.sharded import Cut, read_into
from kit.errors import InputError
from kit.train.base import NF4, nf4_layer, replace_linears, require_bitsandbytes

BLOCK = 64  # weights with one scale
SCALES_BLOCK = 256  # scales that are quantised with one scale
READ_AT_ONCE = 128 << 20  # bytes that a rank reads before it quantises them
QUANTISED_AT_ONCE = 4 << 20  # weights; on CPUs bitsandbytes needs some 20 bytes for each meanwhile


@dataclass(frozen=True)
class PackedWeight:
    """A weight that is to be read and quantised.

    layer: bitsandbytes' Linear4bit. placeholder: its weight until then, without memory. shape and dtype: as it is read.
    """

    layer: Any
    placeholder: Parameter
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def elements(self) -> int:
        """Weights before they are packed."""
        return prod(self.shape)


@dataclass(frozen=True)
class PackedRows:
    """The rows of a packed weight that this rank reads.

    memory: for these rows. readers: the group of ranks that read all rows together; None: all ranks.
    """

    weight: PackedWeight
    piece: Piece
    rows: range
    memory: torch.Tensor
    readers: Any

    @property
    def first_byte(self) -> int:
        """Of the rows in the packed weight. A byte has two weights."""
        return self.rows.start * self.memory.itemsize

    @property
    def elements(self) -> range:
        """The weights of all blocks that the rows have a part of."""
        start, stop = (2 * row * self.memory.itemsize for row in (self.rows.start, self.rows.stop))
        blocks = range(start // BLOCK, -(-stop // BLOCK)) if self.rows else range(0)
        return range(blocks.start * BLOCK, min(blocks.stop * BLOCK, self.weight.elements))

    def read(self, device: str) -> Cut:
        """The read of these weights, as one run of numbers."""
        elements = self.elements
        target = torch.empty(len(elements), dtype=self.weight.dtype, device=device)
        return Cut(target, replace(self.piece, offset=(0,), shape=(self.weight.elements,)), (elements.start,))

    def quantise(self, values: torch.Tensor) -> torch.Tensor:
        """Pack what was read into the memory. Returns the fp32 scales of all blocks: 0 for those of other ranks."""
        from bitsandbytes.functional import quantize_4bit

        scales = torch.zeros(-(-self.weight.elements // BLOCK), device=values.device)
        packed, block = [], self.elements.start // BLOCK
        for part in torch.split(values, QUANTISED_AT_ONCE):
            bytes_, state = quantize_4bit(part, quant_type=NF4["quant_type"], quant_storage=torch.uint8)
            scales[block : block + len(state.absmax)] = state.absmax
            block += len(state.absmax)
            packed.append(bytes_.view(-1))
        if packed:
            first = self.first_byte - self.elements.start // 2
            own = self.memory.view(torch.uint8).view(-1)  # as bytes: copies of floats on GPUs may change a NaN
            own.copy_(torch.cat(packed)[first : first + len(own)])
            if first:  # the block begins in the rows of another rank
                scales[self.elements.start // BLOCK] = 0
        return scales


def outline_nf4(model: Any, names: Mapping[int, str]) -> dict[str, PackedWeight]:
    """Replace the frozen linear layers of the decoder by 4-bit layers without memory. Returns their weights by name.

    names: of the parameters, by the addresses of their placeholders. Raises InputError where bitsandbytes is not
    installed, and for a weight that cannot be stored.
    """
    require_bitsandbytes()
    found = {}

    def outline(linear: Linear) -> Any:
        layer, old = nf4_layer(linear, sharded=True), linear.weight
        rows, rest = divmod(old.numel(), 2 * layer.quant_storage.itemsize)
        if rest:
            raise InputError(
                f"{names[old.data_ptr()]} has {old.numel()} weights, and 4-bit weights are stored "
                f"{2 * layer.quant_storage.itemsize} at a time: set tuning.method to lora."
            )
        layer.weight = Parameter(torch.zeros((), dtype=layer.quant_storage).expand(rows, 1), requires_grad=False)
        for name, value in NF4.items():  # PEFT asks the weight for them
            setattr(layer.weight, name, value)
        found[names[old.data_ptr()]] = PackedWeight(layer, layer.weight, tuple(old.shape), old.dtype)
        return layer

    for parameter in model.parameters():
        parameter.requires_grad_(False)
    replace_linears(model, outline)
    return found


def quantise_as_read(parts: Sequence[PackedRows], device: str) -> int:
    """Read, quantise and store these rows, some tensors at a time. Returns the bytes that this rank has read.

    All ranks call it together, with the same weights. device: where the weights are quantised, and their scales stay.
    """
    read = 0
    for batch in _batches(parts):
        cuts = [part.read(device) for part in batch]
        read_into([cut for cut in cuts if cut.target.numel()])
        read += sum(cut.bytes for cut in cuts)
        for part in batch:
            scales = part.quantise(cuts.pop(0).target)
            distributed.all_reduce(scales, group=part.readers)  # a sum with zeros is exact
            part.weight.layer.quant_state = _state(scales, part.weight)
    return read


def _batches(parts: Sequence[PackedRows]) -> Iterator[list[PackedRows]]:
    """Parts that are read together: the same weights on all ranks."""
    batch: list[PackedRows] = []
    size = 0.0
    for part in parts:
        share = part.weight.elements * part.weight.dtype.itemsize / distributed.get_world_size(part.readers)
        if batch and size + share > READ_AT_ONCE:
            yield batch
            batch, size = [], 0.0
        batch.append(part)
        size += share
    if batch:
        yield batch


def _state(scales: torch.Tensor, weight: PackedWeight) -> Any:
    """bitsandbytes' QuantState of a weight, as its quantize_4bit makes it from the same scales."""
    from bitsandbytes.functional import QuantState, get_4bit_type, quantize_blockwise

    offset = scales.mean()
    absmax, state2 = quantize_blockwise(scales - offset, blocksize=SCALES_BLOCK)
    kind, code = NF4["quant_type"], get_4bit_type(NF4["quant_type"], device=scales.device)
    shape = torch.Size(weight.shape)
    return QuantState(absmax, shape, code, BLOCK, kind, weight.dtype, offset, state2)
