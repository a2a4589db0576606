"""Words of a text in any script, without a language model, and how many tokens a tokenizer spends on them."""

import re
from collections.abc import Sequence
from typing import Any

# Scripts written without spaces (Thai, Lao, Tibetan, Burmese, Khmer, kana, Han): a character counts as a word.
UNSPACED = "\u0e00-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
WORD = re.compile(f"[{UNSPACED}]|[^\\s{UNSPACED}]+")


def words(text: str) -> list[str]:
    """Runs between white space; in scripts written without spaces, single characters (code points)."""
    return WORD.findall(text)


def fertility(tokenizer: Any, texts: Sequence[str]) -> dict[str, float]:
    """{"words", "tokens", "tokens_per_word", "bytes_per_token"} of a transformers tokenizer on these texts.

    Bytes per token compare across scripts, where words do not.
    """
    encoded = tokenizer.backend_tokenizer.encode_batch(list(texts), add_special_tokens=False)
    tokens, word_count = sum(map(len, encoded)), sum(len(words(text)) for text in texts)
    size = sum(len(text.encode()) for text in texts)
    ratios = {"tokens_per_word": tokens / max(1, word_count), "bytes_per_token": size / max(1, tokens)}
    return {"words": word_count, "tokens": tokens} | ratios
