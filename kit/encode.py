"""Conversations into token ids with an exact loss mask, on any chat template.

The template is rendered once with marks around each content. What lies outside the marks is structure: its control
tokens become ids. What lies inside is content: it stays text, whatever it looks like, and is what the loss counts.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kit.errors import KitError

OPEN, CLOSE = "\ue000", "\ue001"  # private-use characters that no template emits
IGNORE = -100  # the label that cross-entropy skips


@dataclass(frozen=True)
class Encoded:
    """Token ids of one conversation and, for each, whether the loss counts it."""

    ids: list[int]
    counts: list[bool]

    @property
    def labels(self) -> list[int]:
        """ids where the loss counts, else -100; never the first token, which nothing predicts."""
        return [IGNORE if i == 0 or not c else t for i, (t, c) in enumerate(zip(self.ids, self.counts, strict=True))]


class Encoder:
    """Encodes by a tokenizer's own chat template. loss: "assistant" counts replies and their end token, "all" all."""

    def __init__(self, tokenizer: Any, loss: str = "assistant") -> None:
        if not tokenizer.is_fast or not tokenizer.chat_template:
            raise KitError(
                f"The tokenizer {tokenizer.name_or_path} has no "
                + ("chat template" if tokenizer.is_fast else "fast version")
                + "; choose an instruct model, or put a chat_template.jinja beside the tokenizer."
            )
        self.tokenizer, self.loss = tokenizer, loss
        self.control = {str(token): i for i, token in tokenizer.added_tokens_decoder.items()}
        by_length = sorted(self.control, key=len, reverse=True)
        self.splitter = re.compile("(" + "|".join(map(re.escape, by_length)) + ")")
        self.trims = self._template_trims()

    def _template_trims(self) -> bool:
        """Whether the template strips white space around contents (Llama 3's does)."""
        text = self._render([{"role": "user", "content": "\n x \n"}, {"role": "assistant", "content": "y"}])
        return "\n x \n" not in text

    def _render(self, messages: Sequence[dict[str, str]]) -> str:
        return str(self.tokenizer.apply_chat_template(list(messages), tokenize=False))

    def __call__(self, conversations: Iterable[Sequence[dict[str, str]]]) -> list[Encoded]:
        """One Encoded a conversation. Raises KitError where the template changes contents: no exact mask then."""
        pieces = [self._pieces(messages) for messages in conversations]
        texts = [p.text for conversation in pieces for p in conversation if p.text]
        encoded = iter(self._encode(texts))
        return [self._join(conversation, encoded) for conversation in pieces]

    def _encode(self, texts: list[str]) -> list[Any]:
        """Plain text to ids: nothing in it is a control token, and no BOS is added."""
        backend = self.tokenizer.backend_tokenizer
        before, backend.encode_special_tokens = backend.encode_special_tokens, True
        try:
            return list(backend.encode_batch(texts, add_special_tokens=False))
        finally:
            backend.encode_special_tokens = before

    def _pieces(self, messages: Sequence[dict[str, str]]) -> list["_Piece"]:
        """Runs of text between control tokens, each with the spans that the loss counts, and the control tokens."""
        contents = [m["content"].strip() if self.trims else m["content"] for m in messages]
        marked = [dict(m, content=OPEN + c + CLOSE) for m, c in zip(messages, contents, strict=True)]
        parts = re.split(f"[{OPEN}{CLOSE}]", self._render(marked))
        if parts[1::2] != contents:
            raise KitError("The chat template changes, drops or reorders contents, so the loss mask cannot be exact.")
        pieces, reply_open = [_Piece()], False
        for index, part in enumerate(parts):
            if index % 2:
                reply_open = messages[index // 2]["role"] == "assistant"
                pieces[-1].add(part, reply_open or self.loss == "all")
                continue
            for text in filter(None, self.splitter.split(part)):
                if text in self.control:
                    counts = reply_open or self.loss == "all"  # the token that ends a reply is trained
                    pieces += [_Piece(control=self.control[text], counts=counts), _Piece()]
                    reply_open = False
                else:
                    pieces[-1].add(text, self.loss == "all")
        return pieces

    def _join(self, pieces: list["_Piece"], encoded: Any) -> Encoded:
        ids: list[int] = []
        counts: list[bool] = []
        for piece in pieces:
            if piece.control is not None:
                ids.append(piece.control)
                counts.append(piece.counts)
            elif piece.text:
                tokens = next(encoded)
                ids += tokens.ids
                counts += [piece.covers(start, end) for start, end in tokens.offsets]
        return Encoded(ids, counts)


class _Piece:
    """A control token, or a run of text with the spans (in characters) that the loss counts."""

    def __init__(self, control: int | None = None, counts: bool = False) -> None:
        self.control, self.counts = control, counts
        self.text = ""
        self.spans: list[tuple[int, int]] = []

    def add(self, text: str, counts: bool) -> None:
        """Append text to the run."""
        if counts and text:
            self.spans.append((len(self.text), len(self.text) + len(text)))
        self.text += text

    def covers(self, start: int, end: int) -> bool:
        """Whether a token at these characters holds any character that counts."""
        return any(start < b and a < end for a, b in self.spans)


def agrees_with_template(encoder: Encoder, messages: Sequence[dict[str, str]], encoded: Encoded) -> bool:
    """Whether the ids equal apply_chat_template's own, as they must where no content looks like a control token."""
    if any(encoder.splitter.search(m["content"]) for m in messages):
        return True
    ids = encoder.tokenizer.apply_chat_template(list(messages), tokenize=True, return_dict=True)["input_ids"]
    return list(ids) == encoded.ids
