"""Train a tokenizer (byte-level BPE, with ChatML) on a data source: `kit data tokenizer`."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from kit import files
from kit.data.sources import Source, open_source
from kit.data.words import fertility
from kit.errors import KitError
from kit.show import Answer, Table

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # padding, start and end of a turn
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MEASURED = 2000  # messages on which the fertility is measured


def train_tokenizer(source: str, out: Path, vocab_size: int = 32_000) -> Answer:
    """Train on every message of the source (streamed; distinct words are held in memory) and save the folder OUT.

    Any text is decoded exactly, and the same texts give the same files. Returns the folder, the size of the vocabulary
    and, by language, the fertility on texts of the source. Raises InputError for an existing OUT, KitError where there
    is no text or vocab_size is too small for the bytes and the control tokens.
    """
    from transformers import PreTrainedTokenizerFast

    opened = open_source(source)
    if next(_texts(opened), None) is None:
        raise KitError(f"{source} has no text to train a tokenizer on.")
    trained = _train((text for _, text in _texts(opened)), vocab_size)
    if trained.get_vocab_size() > vocab_size:
        raise KitError(f"vocab_size {vocab_size} is too small for the control tokens and the bytes; raise it.")
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
    return Answer(
        {"folder": str(out), "vocab_size": len(tokenizer), "fertility": measured},
        f"{out}: {len(tokenizer):,} tokens",
        Table.of([{"language": name, **row} for name, row in measured.items()], "Fertility"),
    )


def _texts(source: Source) -> Iterator[tuple[str, str]]:
    """(language, content) of every message."""
    for _, conversation in source.read("", lambda row, reason: None):
        yield from ((conversation.lang, message["content"]) for message in conversation.messages)


def _train(texts: Iterable[str], vocab_size: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, trainers
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(CONTROL),
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
