"""Run:ai's model streamer (optional package): 16 threads that read past the page cache."""

import importlib
from collections.abc import Iterator
from typing import Any

from kit.checkpoints.loaders.base import SAFETENSORS, Loader, LoadRequest


def load(request: LoadRequest) -> Iterator[Any]:
    """The tensors of all files."""
    with importlib.import_module("runai_model_streamer").SafetensorsStreamer() as streamer:
        streamer.stream_files([str(file) for file in request.weights.files])
        yield from (tensor.to(request.device) for _, tensor in streamer.get_tensors())


LOADERS = (Loader("runai-model-streamer", SAFETENSORS, load, package="runai_model_streamer"),)
