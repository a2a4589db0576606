"""The exact Llama 3.1 tokenizer for tests, built from Meta's file in the PyPI package llama-models; never committed."""

import base64
import hashlib
import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import shared
from tests.conftest import oracle

MODEL = "llama_models/llama3/tokenizer.model"
SHA256 = "82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55"  # of that file in llama-models 0.3.0
# The pattern and the names of control tokens: meta-llama/llama-models, models/llama3/tokenizer.py.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONTROL = [
    "begin_of_text", "end_of_text", "reserved_special_token_0", "reserved_special_token_1", "finetune_right_pad_id",
    "reserved_special_token_2", "start_header_id", "end_header_id", "eom_id", "eot_id", "python_tag",
    *(f"reserved_special_token_{i}" for i in range(3, 248)),
]  # fmt: skip


@pytest.fixture(scope="session")
def llama31():
    """A folder with the tokenizer, the official chat template and a config.json."""
    return shared.once("llama31", build)


def build(folder: Path) -> None:
    """BPE merges from ranks: every pair of known tokens that makes a token, in the order of what it makes."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    raw = (oracle("llama-models-0.3.0") / MODEL).read_bytes()
    assert hashlib.sha256(raw).hexdigest() == SHA256
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in raw.splitlines() if line)}
    letters = _byte_alphabet()
    spelled = {token: "".join(letters[byte] for byte in token) for token in ranks}
    pairs = [
        (rank, ranks[token[:i]], ranks[token[i:]], spelled[token[:i]], spelled[token[i:]])
        for token, rank in ranks.items()
        for i in range(1, len(token))
        if token[:i] in ranks and token[i:] in ranks
    ]
    merges = [pair[3:] for pair in sorted(pairs)]
    bpe = models.BPE({spelled[token]: rank for token, rank in ranks.items()}, merges, ignore_merges=True)
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(f"<|{name}|>", special=True, normalized=False) for name in CONTROL])
    begin = "<|begin_of_text|>"  # as in the tokenizer.json on the hub
    tokenizer.post_processor = processors.TemplateProcessing(f"{begin} $A", special_tokens=[(begin, 128000)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=begin, eos_token="<|eot_id|>", pad_token="<|finetune_right_pad_id|>"
    )
    trl = Path(str(find_spec("trl").origin)).parent  # ships the official template
    fast.chat_template = (trl / "chat_templates" / "llama3_1.jinja").read_text()
    fast.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": len(fast)}))


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's letters for bytes: printable ones stand for themselves, the others for what follows U+00FF."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
