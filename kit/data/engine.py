"""Engine: plain text to token ids and the bytes that each token stands for. Nothing in the text is a control token."""

import json
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple
from unicodedata import is_normalized

import numpy as np
from numpy.typing import NDArray

from kit.errors import InputError, KitError

Name = Literal["tokenizers", "gigatoken"]
Ints = NDArray[np.int32]
Positions = NDArray[np.int64]
CHECKED = 256  # real texts on which a faster engine must agree before it is trusted


class Tokens(NamedTuple):
    """Tokens of one text with the UTF-8 bytes, from `starts` to `ends`, that they stand for."""

    ids: Ints
    starts: Positions
    ends: Positions


class Engine:
    """Encodes texts by a fast tokenizer, or by gigatoken where the tokenizer is byte-level BPE.

    The tokens of byte-level BPE give their places by their own lengths, so no engine has to be asked for offsets.
    Raises InputError where gigatoken is not installed or does not know the tokenizer.
    """

    def __init__(self, tokenizer: Any, name: Name = "tokenizers") -> None:
        self.backend = tokenizer.backend_tokenizer
        self.backend.no_truncation()  # a tokenizer.json may ask for either, which would cut or fill texts unseen
        self.backend.no_padding()
        self.composes = type(self.backend.normalizer).__name__ == "NFC"
        byte_level = type(self.backend.decoder).__name__ == "ByteLevel"
        self.widths = self._widths() if byte_level and (self.composes or self.backend.normalizer is None) else None
        self.fast = _gigatoken(self.backend) if name == "gigatoken" and self.widths is not None else None
        self.unchecked = CHECKED if self.fast else 0

    def __call__(self, texts: Sequence[str]) -> list[Tokens]:
        """One Tokens a text. Raises KitError at the first text on which the engines differ."""
        if self.widths is None:
            return self._with_offsets(texts)
        found = [self._placed(text, ids) for text, ids in zip(texts, self._ids(texts), strict=True)]
        rest = [i for i, tokens in enumerate(found) if tokens is None]
        again = dict(zip(rest, self._with_offsets([texts[i] for i in rest]), strict=True))
        return [tokens or again[i] for i, tokens in enumerate(found)]

    def _ids(self, texts: Sequence[str]) -> list[Ints]:
        if not self.fast:
            return [np.array(e.ids, np.int32) for e in self._encode(texts, offsets=False)]
        found = [self.fast.encode(text).astype(np.int32) for text in texts]
        sample, self.unchecked = texts[: self.unchecked], max(0, self.unchecked - len(texts))
        for text, ids, right in zip(sample, found, self._encode(sample, offsets=False), strict=False):
            if ids.tolist() != right.ids:
                raise KitError(
                    f"Engine gigatoken differs from tokenizers on {text[:80]!r}: {ids[:8].tolist()} against "
                    f"{right.ids[:8]}. Prepare with engine tokenizers."
                )
        return found

    def _placed(self, text: str, ids: Ints) -> Tokens | None:
        """Places by the tokens' own lengths; None where they are not the text's: composed or unknown characters."""
        widths: Positions = self.widths[ids]  # type: ignore[index]
        ends = widths.cumsum()
        size = len(text) if text.isascii() else len(text.encode())
        if (ends[-1] if len(ids) else 0) != size or (self.composes and not is_normalized("NFC", text)):
            return None
        return Tokens(ids, ends - widths, ends)

    def _with_offsets(self, texts: Sequence[str]) -> list[Tokens]:
        """Places by the offsets that tokenizers gives in characters."""
        found = []
        for text, encoding in zip(texts, self._encode(texts, offsets=True), strict=True):
            points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
            sizes = 1 + (points > 0x7F).astype(np.int64) + (points > 0x7FF) + (points > 0xFFFF)
            starts, ends = np.r_[0, sizes.cumsum()][np.array(encoding.offsets, np.int64).reshape(-1, 2)].T
            # Post-processors trim white space from offsets; it belongs to the token that starts with it.
            starts = np.minimum(starts, np.r_[0, np.maximum.accumulate(ends)[:-1]]) if len(ends) else starts
            found.append(Tokens(np.array(encoding.ids, np.int32), starts, ends))
        return found

    def _encode(self, texts: Sequence[str], offsets: bool) -> list[Any]:
        encode = self.backend.encode_batch if offsets else self.backend.encode_batch_fast
        before, self.backend.encode_special_tokens = self.backend.encode_special_tokens, True
        try:
            return list(encode(list(texts), add_special_tokens=False))
        finally:
            self.backend.encode_special_tokens = before

    def _widths(self) -> Positions:
        """Bytes of each token: a character of the byte-level alphabet is one byte, an added token is itself."""
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        widths = np.zeros(max(vocabulary.values()) + 1, np.int64)
        for token, i in vocabulary.items():
            widths[i] = len(token)
        for i, token in self.backend.get_added_tokens_decoder().items():
            widths[i] = len(token.content.encode())
        return widths


def _gigatoken(backend: Any) -> Any:
    """gigatoken's encoder of the same vocabulary, which does not know the control tokens."""
    try:
        import gigatoken
    except ImportError:
        raise InputError("engine gigatoken is not installed: pip install 'finetune-kit[fast]'.") from None
    text = backend.to_str()
    at = text.index('"added_tokens":') + len('"added_tokens":')
    added, end = json.JSONDecoder().raw_decode(text, at)
    plain = json.dumps([token for token in added if not token["special"]])
    try:
        return gigatoken.Tokenizer.from_json(text[:at] + plain + text[end:]).backend
    except (ValueError, RuntimeError) as error:
        why = str(error).splitlines()[0]
        raise InputError(f"engine gigatoken cannot take this tokenizer ({why}); use engine tokenizers.") from None
