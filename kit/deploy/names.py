"""Names: a model's tensors in memory, which adapters use, for those in its files, which may be older ones."""

import warnings
from pathlib import Path
from typing import Any


class MemoryNames:
    """transformers' names of tensors as it loads the model of this folder. Unchanged for classes that it lacks."""

    def __init__(self, folder: Path) -> None:
        import torch
        import transformers
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        config = transformers.AutoConfig.from_pretrained(folder)
        model_class: Any = getattr(transformers, (config.architectures or [""])[0], None)
        self.expected: dict[str, Any] = {}
        if model_class is None:
            return
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of settings that transformers deprecates
            model = model_class(config)
        mapping = get_model_conversion_mapping(model)
        self.renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        self.converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        self.prefix, self.expected = model.base_model_prefix, model.state_dict()

    def of(self, name: str) -> str:
        """The name in memory of a tensor on disk; empty for one that loading splits or joins with others."""
        from transformers.core_model_loading import rename_source_key

        if not self.expected:
            return name
        renamed, converter = rename_source_key(name, self.renamings, self.converters, self.prefix, self.expected)
        return "" if converter else str(renamed)
