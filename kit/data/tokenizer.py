"""Tokenizers trained on one's own texts, and how many tokens a word costs with each, language by language."""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from kit import files
from kit.data.conversations import Conversation
from kit.errors import InputError, KitError

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # padding, opening and end of a turn
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BYTES = [f"<0x{i:02X}>" for i in range(256)]  # SentencePiece's names for single bytes
ASCII = [chr(i) for i in range(33, 127)]
NEVER = -1e6  # a score below that of any path of characters: text never turns into a control or byte token

# Scripts written without spaces (Thai, Lao, Tibetan, Burmese, Khmer, kana, Han): there a character counts as a word.
UNSPACED = "\u0e00-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
WORD = re.compile(f"[{UNSPACED}]|[^\\s{UNSPACED}]+")


def words(text: str) -> list[str]:
    """Runs between white space; in scripts written without spaces, single characters (code points)."""
    return WORD.findall(text)


def texts(conversations: Iterable[Conversation]) -> Iterator[str]:
    """Every message's content: what a tokenizer is trained on and measured by."""
    return (message["content"] for found in conversations for message in found.messages)


def train(
    sample: Iterable[str], out: Path, kind: str = "bpe", vocab_size: int = 32_000, extra_tokens: Sequence[str] = ()
) -> Any:
    """Train on the sample (streamed; its distinct words are held in memory) and save OUT for AutoTokenizer.

    kind "bpe": bytes, so that any text comes back exactly. "unigram": SentencePiece's model with byte fallback and no
    normalisation; text comes back exactly but for U+2581, its mark for a space. ChatML's control tokens and
    extra_tokens come first. The same texts give the same files. Raises InputError for an unknown kind or an existing
    OUT, KitError where there is no text or its characters alone are more than vocab_size.
    """
    from transformers import PreTrainedTokenizerFast

    if kind not in ("bpe", "unigram"):
        raise InputError(f"Tokenizer kind {kind!r} is unknown; the kinds are bpe and unigram.")
    stream = iter(sample)
    if (first := next(stream, None)) is None:
        raise KitError("There is no text to train a tokenizer on.")
    make = _bpe if kind == "bpe" else _unigram
    trained = make(chain([first], stream), vocab_size, [*CONTROL, *extra_tokens])
    if trained is None or trained.get_vocab_size() > vocab_size:
        raise KitError(
            f"vocab_size {vocab_size} is too small for the control tokens and the single characters of these texts; "
            "raise it, or use bpe, whose characters are the 256 bytes."
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=trained, eos_token="<|im_end|>", pad_token="<|endoftext|>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = CHATML
    with files.new_folder(out) as folder:
        tokenizer.save_pretrained(folder)
    return tokenizer


def _bpe(sample: Iterable[str], vocab_size: int, control: list[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, trainers
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=control, initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(sample, trainer)
    return tokenizer


def _unigram(sample: Iterable[str], vocab_size: int, control: list[str]) -> Any:
    """Trained pieces behind control tokens and bytes, which no text turns into; None if vocab_size is too small."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, trainers
    from tokenizers.pre_tokenizers import Metaspace, Sequence, Split

    tokenizer, reserved = Tokenizer(models.Unigram()), ["<unk>", *control, *BYTES]
    tokenizer.pre_tokenizer = Sequence([Split(Regex("\n+"), "isolated"), Metaspace(prepend_scheme="never")])
    trainer = trainers.UnigramTrainer(
        vocab_size=max(1, vocab_size - len(reserved) + 1),
        special_tokens=["<unk>"],
        unk_token="<unk>",
        initial_alphabet=sorted({*ASCII, *"".join(control)}),  # reserved names must be writable as plain characters
        show_progress=False,
    )
    try:
        tokenizer.train_from_iterator(sample, trainer)
    except Exception as error:  # tokenizers has no class for it
        if "not large enough" not in str(error):
            raise
        return None
    vocabulary = json.loads(tokenizer.to_str())["model"]["vocab"]
    pieces = _settled({piece: score for piece, score in vocabulary if piece not in reserved})
    tokenizer.model = models.Unigram([(name, NEVER) for name in reserved] + pieces, unk_id=0, byte_fallback=True)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in control])
    metaspace = decoders.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Sequence([metaspace, decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _settled(scores: dict[str, float]) -> list[tuple[str, float]]:
    """Pieces in an order, and with scores, that do not change from run to run.

    The trainer sums over a hash map, so last digits vary; characters that it lost on the way get the lowest score plus
    0.0001 k in that map's order (tokenizers, models/unigram/trainer.rs, finalize). Here these all get the lowest.
    """
    low = min(scores.values())
    rare = low + 1e-4 * sum(len(piece) == 1 for piece in scores)
    settled = {p: low if len(p) == 1 and s <= rare else s for p, s in scores.items()}
    return sorted(((p, round(s, 4)) for p, s in settled.items()), key=lambda item: (-item[1], item[0]))


def fertility(tokenizer: Any, sample: Sequence[str]) -> dict[str, float]:
    """{"words", "tokens", "tokens_per_word", "bytes_per_token"}; words as words() counts them.

    Bytes per token compare across scripts, where words do not.
    """
    encoded = tokenizer.backend_tokenizer.encode_batch(sample, add_special_tokens=False)
    tokens, counted = sum(map(len, encoded)), sum(len(words(text)) for text in sample)
    size = sum(len(text.encode()) for text in sample)
    ratios = {"tokens_per_word": tokens / max(1, counted), "bytes_per_token": size / max(1, tokens)}
    return {"words": counted, "tokens": tokens} | ratios


def compare(tokenizers: Mapping[str, Any], conversations: Iterable[Conversation]) -> list[dict[str, Any]]:
    """A row a language, and one for all: {"lang", "texts", and each tokenizer's fertility under its name}.

    tokenizers: {"before": ..., "after": ...}. Give a sample that was not trained on; it is held in memory.
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for found in conversations:
        for lang in (found.lang or "unknown", "all"):
            groups[lang] += texts([found])
    named = ((lang, groups[lang]) for lang in sorted(groups, key=lambda lang: (lang == "all", lang)))
    return [
        {"lang": lang, "texts": len(group)} | {name: fertility(t, group) for name, t in tokenizers.items()}
        for lang, group in named
    ]
