"""Engine: token ids of plain texts and the bytes that each token covers. Control tokens in a text stay plain text."""

import json
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple
from unicodedata import is_normalized

import numpy as np
from numpy.typing import NDArray

from kit.errors import InputError, KitError

EngineName = Literal["auto", "tokenizers", "gigatoken"]
TokenIds = NDArray[np.int32]
BytePositions = NDArray[np.int64]

COMPARED_TEXTS = 256  # texts of the data on which gigatoken must agree with tokenizers before it is trusted
PROBE_TEXTS = (
    "",
    " ",
    " \n\n\t x  =  1\r\n",
    "It's 1234567 o'clock, we'LL see.",
    "caf\u00e9 cafe\u0301 \u00df \u0130 \ufb01",
    "\u4f60\u597d\uff0c\u4e16\u754c \u3053\u3093\u306b\u3061\u306f \ud55c\uad6d\uc5b4",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
    "\U0001f389\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea",
    "<|im_end|><|eot_id|></s>[INST]<unk>",
    "\x00\x04\u00a0\u2028\ufeff\ufffd",
)


class Tokens(NamedTuple):
    """Tokens of one text; token i covers the UTF-8 bytes from starts[i] to ends[i]."""

    ids: TokenIds
    starts: BytePositions
    ends: BytePositions


class Engine:
    """Encodes texts with a fast tokenizer, or with gigatoken, which gives the same ids several times as fast.

    "auto" uses gigatoken where it is installed, knows the tokenizer and agrees with tokenizers on PROBE_TEXTS and on
    the first COMPARED_TEXTS texts of the data; else tokenizers. "gigatoken" raises InputError or KitError instead.

    Tokens of byte-level BPE have their positions from their own lengths, so no engine is asked for offsets.
    """

    def __init__(self, tokenizer: Any, name: EngineName = "tokenizers") -> None:
        self.backend = tokenizer.backend_tokenizer
        self.backend.no_truncation()  # a tokenizer.json may ask for truncation or padding, which would change texts
        self.backend.no_padding()
        self.composes = type(self.backend.normalizer).__name__ == "NFC"
        byte_level = type(self.backend.decoder).__name__ == "ByteLevel"
        normalizer_is_known = self.composes or self.backend.normalizer is None
        self.widths = self._token_widths() if byte_level and normalizer_is_known else None
        self.required = name == "gigatoken"
        self.gigatoken: Any = None
        self.uncompared = COMPARED_TEXTS
        if name != "tokenizers":
            self._start_gigatoken()

    @property
    def name(self) -> Literal["tokenizers", "gigatoken"]:
        """The engine in use."""
        return "gigatoken" if self.gigatoken else "tokenizers"

    def __call__(self, texts: Sequence[str]) -> list[Tokens]:
        """One Tokens per text. Raises KitError at the first text on which a required gigatoken differs."""
        if self.widths is None:
            return self._with_offsets(texts)
        found = [self._with_widths(text, ids) for text, ids in zip(texts, self._encode_ids(texts), strict=True)]
        unplaced = [index for index, tokens in enumerate(found) if tokens is None]
        placed = dict(zip(unplaced, self._with_offsets([texts[index] for index in unplaced]), strict=True))
        return [tokens or placed[index] for index, tokens in enumerate(found)]

    def _start_gigatoken(self) -> None:
        try:
            self.gigatoken = self._load_gigatoken()
        except InputError:
            if self.required:
                raise
            return
        self._compare(PROBE_TEXTS, [self.gigatoken.encode(text) for text in PROBE_TEXTS])

    def _load_gigatoken(self) -> Any:
        """gigatoken's encoder of the same vocabulary without the control tokens. Raises InputError."""
        if self.widths is None:
            raise InputError("Engine gigatoken takes byte-level BPE tokenizers alone; use engine auto or tokenizers.")
        try:
            import gigatoken
        except ImportError:
            raise InputError("Engine gigatoken is not installed: pip install 'finetune-kit[fast]'.") from None
        text = self.backend.to_str()
        start = text.index('"added_tokens":') + len('"added_tokens":')
        added, end = json.JSONDecoder().raw_decode(text, start)
        plain = json.dumps([token for token in added if not token["special"]])
        try:
            return gigatoken.Tokenizer.from_json(text[:start] + plain + text[end:]).backend
        except (ValueError, RuntimeError) as error:
            why = str(error).splitlines()[0]
            raise InputError(f"Engine gigatoken cannot take this tokenizer ({why}); use engine tokenizers.") from None

    def _encode_ids(self, texts: Sequence[str]) -> list[TokenIds]:
        if self.gigatoken:
            found = [self.gigatoken.encode(text).astype(np.int32) for text in texts]
            compared = min(self.uncompared, len(texts))
            self._compare(texts[:compared], found[:compared])
            self.uncompared -= compared
            if self.gigatoken:
                return found
        return [np.array(encoding.ids, np.int32) for encoding in self._encode(texts, offsets=False)]

    def _compare(self, texts: Sequence[str], found: Sequence[Any]) -> None:
        """Check ids against tokenizers; on a difference stop using gigatoken, or raise KitError where it is required.

        Texts are compared in order, so all ids from before the difference are right.
        """
        for text, ids, expected in zip(texts, found, self._encode(texts, offsets=False), strict=True):
            if ids.tolist() == expected.ids:
                continue
            if self.required:
                raise KitError(
                    f"Engine gigatoken differs from tokenizers on {text[:80]!r}: {ids[:8].tolist()} instead of "
                    f"{expected.ids[:8]}. Prepare with engine tokenizers."
                )
            self.gigatoken = None
            return

    def _with_widths(self, text: str, ids: TokenIds) -> Tokens | None:
        """Positions from the tokens' lengths; None where these do not add up: composed or unknown characters."""
        widths: BytePositions = self.widths[ids]  # type: ignore[index]
        ends = widths.cumsum()
        size = len(text) if text.isascii() else len(text.encode())
        if (ends[-1] if len(ids) else 0) != size or (self.composes and not is_normalized("NFC", text)):
            return None
        return Tokens(ids, ends - widths, ends)

    def with_control_tokens(self, texts: Sequence[str]) -> list[Tokens]:
        """One Tokens per text, in which control tokens are control tokens."""
        return self._with_offsets(texts, plain=False)

    def _with_offsets(self, texts: Sequence[str], plain: bool = True) -> list[Tokens]:
        """Positions from the offsets that tokenizers gives, in characters."""
        found = []
        for text, encoding in zip(texts, self._encode(texts, offsets=True, plain=plain), strict=True):
            code_points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
            sizes = np.searchsorted([0x7F, 0x7FF, 0xFFFF], code_points) + 1  # bytes of each character in UTF-8
            starts, ends = np.r_[0, sizes.cumsum()][np.array(encoding.offsets, np.int64).reshape(-1, 2)].T
            # Post-processors trim white space from offsets; it belongs to the token that starts with it.
            starts = np.minimum(starts, np.r_[0, np.maximum.accumulate(ends)[:-1]]) if len(ends) else starts
            found.append(Tokens(np.array(encoding.ids, np.int32), starts, ends))
        return found

    def _encode(self, texts: Sequence[str], offsets: bool, plain: bool = True) -> list[Any]:
        encode = self.backend.encode_batch if offsets else self.backend.encode_batch_fast
        before, self.backend.encode_special_tokens = self.backend.encode_special_tokens, plain
        try:
            return list(encode(list(texts), add_special_tokens=False))
        finally:
            self.backend.encode_special_tokens = before

    def _token_widths(self) -> BytePositions:
        """Bytes of each token id: a character of the byte-level alphabet is one byte; added tokens are UTF-8."""
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        widths = np.zeros(max(vocabulary.values()) + 1, np.int64)
        for token, token_id in vocabulary.items():
            widths[token_id] = len(token)
        for token_id, token in self.backend.get_added_tokens_decoder().items():
            widths[token_id] = len(token.content.encode())
        return widths
