"""Preview: the rows of a dataset as a person sees them, with what the loss counts in colour."""

import html

from kit.data.dataset import Dataset
from kit.data.encode import IGNORE


def preview(dataset: Dataset, split: str = "train", row: int = 0, tokens: int = 400) -> str:
    """The head of one row as HTML: what the loss counts in blue on light blue, document borders as bars."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(dataset.path / "tokenizer")
    values = dataset.rows(split)[row]
    starts = {sum(values["seq_lengths"][:i]) for i in range(1, len(values["seq_lengths"]))}
    parts = []
    for i, (token, label) in enumerate(zip(values["input_ids"][:tokens], values["labels"], strict=False)):
        style = ' style="background:#dbeafe;color:#1d4ed8"' if label != IGNORE else ""
        bar = '<hr style="border:0;border-top:2px dashed #334155">' if i in starts else ""
        parts.append(f"{bar}<span{style}>{html.escape(tokenizer.decode([token]))}</span>")
    return f'<div style="white-space:pre-wrap;font-family:monospace;font-size:12px">{"".join(parts)}</div>'
