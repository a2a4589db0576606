"""Train a tokenizer (BPE or unigram, with ChatML) on a data source: `kit data tokenizer`."""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from kit import files
from kit.data.sources import Source, open_source
from kit.data.words import fertility
from kit.errors import InputError, KitError
from kit.show import Part, Result, Table

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # padding, start and end of a turn
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RESERVED = ["<unk>", *CONTROL, *(f"<0x{byte:02X}>" for byte in range(256))]  # of unigram: SentencePiece's byte names
NEVER = -1e6  # a score below that of any path of characters: text never becomes a reserved token
MEASURED = 2000  # conversations on which the fertility is measured


@dataclass(frozen=True)
class TrainedTokenizer(Result):
    """A new tokenizer folder for AutoTokenizer, and its fertility by language on texts of its training source."""

    folder: Path
    vocab_size: int
    fertility: dict[str, dict[str, float]]

    def as_dict(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self) | {"folder": str(self.folder)}

    def parts(self) -> Iterator[Part]:
        """The folder, then a table by language."""
        yield f"{self.folder}: {self.vocab_size:,} tokens"
        yield Table.of([{"language": name, **row} for name, row in self.fertility.items()], "Fertility")


def train_tokenizer(source: str, out: Path, vocab_size: int = 32_000, kind: str = "bpe") -> TrainedTokenizer:
    """Train on every message of the source (streamed; distinct words are held in memory) and save the folder OUT.

    "bpe" works on bytes. "unigram" is SentencePiece's model with byte fallback and without normalisation. Any text is
    decoded exactly, except U+2581 with unigram; the same texts give the same files. Raises InputError for an unknown
    kind or an existing OUT, KitError where there is no text or vocab_size is below the number of characters.
    """
    from transformers import PreTrainedTokenizerFast

    if kind not in ("bpe", "unigram"):
        raise InputError(f"Tokenizer kind {kind!r} is unknown; choose bpe or unigram.")
    opened = open_source(source)
    if next(_texts(opened), None) is None:
        raise KitError(f"{source} has no text to train a tokenizer on.")
    trained = (_train_bpe if kind == "bpe" else _train_unigram)((text for _, text in _texts(opened)), vocab_size)
    if trained is None or trained.get_vocab_size() > vocab_size:
        raise KitError(f"vocab_size {vocab_size} is too small for the control tokens and characters; raise it.")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=trained, eos_token="<|im_end|>", pad_token="<|endoftext|>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = CHATML
    by_language = defaultdict(list)
    for lang, text in islice(_texts(opened), MEASURED):
        by_language[lang or "unknown"].append(text)
    with files.new_folder(out) as folder:
        tokenizer.save_pretrained(folder)
    measured = {lang: fertility(tokenizer, texts) for lang, texts in sorted(by_language.items())}
    return TrainedTokenizer(out, len(tokenizer), measured)


def _texts(source: Source) -> Iterator[tuple[str, str]]:
    """(language, content) of every message."""
    for _, conversation in source.read("", lambda row, reason: None):
        yield from ((conversation.lang, message["content"]) for message in conversation.messages)


def _train_bpe(texts: Iterable[str], vocab_size: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, trainers
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(CONTROL),
            initial_alphabet=ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer


def _train_unigram(texts: Iterable[str], vocab_size: int) -> Any:
    """The trained pieces after the reserved tokens; None if vocab_size is too small."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, trainers
    from tokenizers.pre_tokenizers import Metaspace, Sequence, Split

    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = Sequence([Split(Regex("\n+"), "isolated"), Metaspace(prepend_scheme="never")])
    trainer = trainers.UnigramTrainer(
        vocab_size=max(1, vocab_size - len(RESERVED) + 1),
        special_tokens=["<unk>"],
        unk_token="<unk>",
        initial_alphabet=[chr(code) for code in range(33, 127)],  # names of reserved tokens must be writable as text
        show_progress=False,
    )
    try:
        tokenizer.train_from_iterator(texts, trainer)
    except Exception as error:  # tokenizers has no exception class for this
        if "not large enough" not in str(error):
            raise
        return None
    vocabulary = json.loads(tokenizer.to_str())["model"]["vocab"]
    pieces = _reproducible({piece: score for piece, score in vocabulary if piece not in RESERVED})
    tokenizer.model = models.Unigram([(name, NEVER) for name in RESERVED] + pieces, unk_id=0, byte_fallback=True)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in CONTROL])
    metaspace = decoders.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Sequence([metaspace, decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _reproducible(scores: dict[str, float]) -> list[tuple[str, float]]:
    """Pieces with scores and in an order that do not change between runs.

    The trainer sums over a hash map, so last digits vary; characters that it lost on the way get the lowest score plus
    0.0001 k in that map's order (tokenizers, models/unigram/trainer.rs, finalize). Here these all get the lowest.
    """
    lowest = min(scores.values())
    lost = lowest + 1e-4 * sum(len(piece) == 1 for piece in scores)
    settled = {p: lowest if len(p) == 1 and score <= lost else score for p, score in scores.items()}
    return sorted(((p, round(score, 4)) for p, score in settled.items()), key=lambda item: (-item[1], item[0]))
