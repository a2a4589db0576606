"""Arrow arrays made from NumPy buffers, because pyarrow.array() imports pandas: one second and 40 MB."""

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def integers(values: Array) -> Any:
    """An Arrow array of the same integer type."""
    import pyarrow as pa

    kind = {"int8": pa.int8(), "int32": pa.int32(), "int64": pa.int64()}[values.dtype.name]
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(np.ascontiguousarray(values))])


def strings(values: Sequence[str]) -> Any:
    """An Arrow array of UTF-8 strings, at most 2 GiB in all."""
    import pyarrow as pa

    encoded = [value.encode() for value in values]
    offsets = np.cumsum([0, *map(len, encoded)]).astype(np.int32)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.string(), len(values), buffers)


def lists(arrays: Sequence[Array], bounds: Array | None = None) -> Any:
    """Integer arrays as an Arrow array of int32 lists: one list per array, or the joined values cut at `bounds`."""
    import pyarrow as pa

    bounds = np.cumsum([0, *map(len, arrays)]) if bounds is None else bounds
    joined = arrays[0] if len(arrays) == 1 else np.concatenate([np.zeros(0, np.int32), *arrays])
    values = joined.astype(np.int32, copy=False)
    return pa.ListArray.from_arrays(integers(bounds.astype(np.int32)), integers(values))
