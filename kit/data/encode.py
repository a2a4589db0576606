"""Encoder: conversations into token ids with an exact loss mask, for any chat template.

template.py renders a conversation and says which text is the template's: its control tokens become ids. Text of a
message stays text, even if it looks like a control token. The loss counts the content of replies and the token that
ends them.

Each text between control tokens is encoded by itself. That gives the ids of the complete text, unless the tokenizer's
control tokens take white space from their neighbours, or its first word has a prefix. Conversations of such tokenizers
are encoded in one piece.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kit.data.engine import Engine, EngineName, TokenIds, Tokens
from kit.data.places import Messages, Piece, Rendered
from kit.data.template import ChatTemplate, Tools
from kit.errors import KitError

MAX_TEMPLATE_TEXTS = 1024  # whose ids are kept
IGNORE = -100  # the label that PyTorch's cross-entropy skips
TokenMask = NDArray[np.bool_]
ByteSpan = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids of one conversation and, for each, whether the loss counts it; or why the template refused it."""

    ids: TokenIds
    in_loss: TokenMask
    template_tokens: int = 0  # tokens that hold no byte of any message
    refused: str = ""  # the reason in words, for the ledger; empty where the conversation was encoded
    rewritten: bool = False  # the template has left out, changed or moved words of a message
    open_end: bool = False  # the last reply has no end token
    unused: tuple[str, ...] = ()  # keys that the template does not take

    @property
    def loss_tokens(self) -> int:
        """How many labels the loss counts."""
        return int(np.count_nonzero(self.in_loss[1:]))

    @property
    def labels(self) -> TokenIds:
        """ids where the loss counts, else IGNORE; never the first token, which no token predicts."""
        labels = np.where(self.in_loss, self.ids, np.int32(IGNORE))
        labels[:1] = IGNORE
        return labels


@dataclass(slots=True)
class _TextRun:
    """Text between control tokens, with the spans of bytes that are content and those that the loss counts."""

    text: str = ""
    size: int = 0  # bytes of UTF-8
    content: list[ByteSpan] = field(default_factory=list)
    in_loss: list[ByteSpan] = field(default_factory=list)

    def add(self, text: str, is_content: bool = False, in_loss: bool = False) -> None:
        span = self.size, self.size + (len(text) if text.isascii() else len(text.encode()))
        self.text, self.size = self.text + text, span[1]
        if is_content:
            self.content.append(span)
        if in_loss:
            self.in_loss.append(span)


class _ControlRun(NamedTuple):
    """Ids of the template, from one control token to another, and which of them the loss counts.

    `loss_span` is the part of their text, in bytes, that the loss counts.
    """

    ids: TokenIds
    in_loss: TokenMask
    text: str = ""
    loss_span: ByteSpan = (0, 0)


class _TemplateText(NamedTuple):
    """Template text between two contents: text that joins the first, control tokens, text that joins the second.

    The control tokens are the same in both runs; the loss counts their first where it counts the message before them.
    Without control tokens there are no runs, and `tail` is empty.
    """

    head: str
    tail: str
    behind_counted: _ControlRun | None = None
    behind_other: _ControlRun | None = None


@dataclass(slots=True)
class _Layout:
    """Runs of text and of control tokens in order, with what is known of the conversation's rendering."""

    runs: list[_TextRun | _ControlRun]
    rendered: Rendered
    open_end: bool = False


def _refused(reason: str) -> Encoded:
    return Encoded(np.zeros(0, np.int32), np.zeros(0, np.bool_), refused=reason)


class Encoder:
    """Encodes with a tokenizer's own chat template. loss "assistant" counts replies and their end token, "all" all."""

    def __init__(self, tokenizer: Any, loss: str = "assistant", engine: EngineName = "tokenizers") -> None:
        if not tokenizer.is_fast:
            raise KitError(f"The tokenizer {tokenizer.name_or_path} has no fast version; choose a model that has one.")
        self.tokenizer, self.loss = tokenizer, loss
        self.engine = Engine(tokenizer, engine)
        self.control_ids = {str(token): token_id for token_id, token in tokenizer.added_tokens_decoder.items()}
        specials = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        self.control_pattern, self.special_pattern = _any_of(self.control_ids), _any_of(specials)
        self.template_texts: dict[str, _TemplateText] = {}
        self.is_piecewise = True  # False where a conversation shows that the tokenizer joins neighbours

    @cached_property
    def template(self) -> ChatTemplate:
        """Loaded at the first conversation. Raises KitError if the tokenizer has no template."""
        return ChatTemplate(self.tokenizer, self.control_pattern, self.special_pattern)

    def __call__(self, conversations: Sequence[Messages], tools: Sequence[Tools] = ()) -> list[Encoded]:
        """One Encoded per conversation; a single message of role "text" is a document and takes no template.

        Raises KitError where the tokenizer has no chat template.
        """
        given = tools or [()] * len(conversations)
        chats = [index for index, messages in enumerate(conversations) if messages[0]["role"] != "text"]
        rendered: dict[int, Rendered] = {}
        if chats:
            found = self.template([conversations[index] for index in chats], [given[index] for index in chats])
            rendered = dict(zip(chats, found, strict=True))
        layouts = [
            self._chat_layout(rendered[index]) if index in rendered else self._document_layout(messages[0])
            for index, messages in enumerate(conversations)
        ]
        unsplit = set(rendered) if rendered and (self._joins_neighbours or not self.is_piecewise) else set()
        pieces = [run for index, layout in enumerate(layouts) if index not in unsplit for run in layout.runs]
        tokens = iter(self.engine([run.text for run in pieces if isinstance(run, _TextRun)]))
        return [
            self._assemble_unsplit(layout) if index in unsplit else self._assemble(layout, tokens)
            for index, layout in enumerate(layouts)
        ]

    @cached_property
    def _joins_neighbours(self) -> bool:
        """Whether this tokenizer gives a text other ids than its parts between control tokens."""
        backend, template = self.tokenizer.backend_tokenizer, self.template.source()
        used = [
            token
            for token in self.tokenizer.added_tokens_decoder.values()
            if str(token) in template or str(token) in (self.tokenizer.bos_token, self.tokenizer.eos_token)
        ]
        takes_space = any(token.lstrip or token.rstrip or token.single_word for token in used)
        is_normalised = backend.normalizer is not None and any(token.normalized for token in used)
        words = backend.pre_tokenizer.__getstate__() if backend.pre_tokenizer else b""
        return takes_space or is_normalised or b'"prepend_scheme":"first"' in words

    def _chat_layout(self, rendered: Rendered) -> _Layout:
        runs: list[_TextRun | _ControlRun] = []
        run, last = _TextRun(), Piece("")  # the last content since a control token of the template
        for piece in rendered.pieces:
            counts = self._counts(piece)
            if piece.is_turn:
                run, last = self._add_turn(piece.text, counts, runs, run), piece
            elif piece.is_content:
                run.add(piece.text, is_content=True, in_loss=counts)
                last = piece
            elif piece.text:
                found = self._template_text(piece.text)
                is_counted = self._counts(last)
                control = found.behind_counted if is_counted else found.behind_other
                run.add(found.head, in_loss=is_counted and (control is not None or self.loss == "all"))
                if control is not None:
                    runs += [run, control]
                    run, last = _TextRun(), Piece("")
                    run.add(found.tail, in_loss=counts)
        kept = [item for item in [*runs, run] if isinstance(item, _ControlRun) or item.text]
        return _Layout(kept, rendered, last.in_loss)

    def _counts(self, piece: Piece) -> bool:
        return piece.in_loss or (self.loss == "all" and not piece.left_out)

    def _control_run(self, ids: TokenIds, texts: Sequence[str], is_counted: bool) -> _ControlRun:
        """The first control token after a reply ends it, so it counts as that does."""
        in_loss = np.full(len(ids), self.loss == "all")
        in_loss[0] = is_counted
        first, size = len(texts[0].encode()), len("".join(texts).encode())
        span = (0 if is_counted else first, size if self.loss == "all" else first)
        return _ControlRun(ids, in_loss, "".join(texts), span)

    def _add_turn(self, text: str, counts: bool, runs: list[_TextRun | _ControlRun], run: _TextRun) -> _TextRun:
        """Append a reply with control tokens of the template inside; returns the run after the last of these."""
        for part in self.control_pattern.split(text):
            if part not in self.control_ids:
                run.add(part, is_content=True, in_loss=counts)
                continue
            ids = np.array([self.control_ids[part]], np.int32)
            span = (0, len(part.encode()) if counts else 0)
            runs += [run, _ControlRun(ids, np.array([counts]), part, span)]
            run = _TextRun()
        return run

    def _template_text(self, piece: str) -> _TemplateText:
        if piece in self.template_texts:
            return self.template_texts[piece]
        head, *rest = self.control_pattern.split(piece)
        tail = rest.pop() if rest else ""
        found = _TemplateText(head, tail)
        if rest:
            ids = np.concatenate([self._control_or_text_ids(text) for text in rest if text]).astype(np.int32)
            found = _TemplateText(head, tail, *(self._control_run(ids, rest, counts) for counts in (True, False)))
        if len(self.template_texts) < MAX_TEMPLATE_TEXTS:  # tools and dates may differ in every conversation
            self.template_texts[piece] = found
        return found

    def _control_or_text_ids(self, text: str) -> Any:
        return [self.control_ids[text]] if text in self.control_ids else self.engine([text])[0].ids

    def _document_layout(self, message: dict[str, Any]) -> _Layout:
        """Plain text, all of it in the loss, between BOS, if the tokenizer itself adds it, and EOS."""
        tokenizer = self.tokenizer
        if tokenizer.eos_token_id is None:
            raise KitError(f"The tokenizer {tokenizer.name_or_path} has no EOS token, so documents would run together.")
        run = _TextRun()
        run.add(message["content"], is_content=True, in_loss=True)
        adds_bos = tokenizer.bos_token_id in tokenizer.backend_tokenizer.encode("").ids
        bos = [tokenizer.bos_token_id] if adds_bos and tokenizer.bos_token_id != tokenizer.eos_token_id else []
        begin, end = (
            _ControlRun(np.array(ids, np.int32), np.ones(len(ids), np.bool_)) for ids in (bos, [tokenizer.eos_token_id])
        )
        return _Layout([begin, run, end], Rendered())

    def _assemble(self, layout: _Layout, tokens: Iterator[Tokens]) -> Encoded:
        if layout.rendered.refused:
            return _refused(layout.rendered.refused)
        ids, masks, content_tokens = [], [], 0
        for item in layout.runs:
            if isinstance(item, _ControlRun):
                ids.append(item.ids)
                masks.append(item.in_loss)
                continue
            found = next(tokens)
            is_content = _covered(found, item.content)
            ids.append(found.ids)
            masks.append(is_content if item.in_loss == item.content else _covered(found, item.in_loss))
            content_tokens += int(np.count_nonzero(is_content))
        all_ids, in_loss = np.concatenate(ids), np.concatenate(masks)
        return self._encoded(layout, all_ids, in_loss, content_tokens)

    def _assemble_unsplit(self, layout: _Layout) -> Encoded:
        """Ids of the complete text. Content that looks like a control token would become one, so that is refused."""
        if layout.rendered.refused:
            return _refused(layout.rendered.refused)
        contents = [piece.text for piece in layout.rendered.pieces if piece.is_content and not piece.is_turn]
        if any(map(self.special_pattern.search, contents)):
            return _refused("control token in a message")
        text = _TextRun()
        for item in layout.runs:
            at = text.size
            text.add(item.text)
            if isinstance(item, _ControlRun):
                start, end = item.loss_span
                text.in_loss += [(at + start, at + end)] if start < end else []
            else:
                text.content += [(at + start, at + end) for start, end in item.content]
                text.in_loss += [(at + start, at + end) for start, end in item.in_loss]
        (found,) = self.engine.with_control_tokens([text.text])
        is_control = np.isin(found.ids, list(self.control_ids.values()))
        # A control token may have taken white space from its neighbours; it is where it starts.
        starts_inside = _covered(Tokens(found.ids, found.starts, found.starts + 1), text.in_loss)
        in_loss = np.where(is_control, starts_inside, _covered(found, text.in_loss))
        is_content = _covered(found, text.content) & ~is_control
        return self._encoded(layout, found.ids, in_loss, int(np.count_nonzero(is_content)))

    def _encoded(self, layout: _Layout, ids: TokenIds, in_loss: TokenMask, content_tokens: int) -> Encoded:
        rendered = layout.rendered
        if self.loss == "all" and not any(piece.left_out for piece in rendered.pieces):
            in_loss = in_loss | True  # tokens of no bytes too
        return Encoded(
            ids,
            in_loss,
            len(ids) - content_tokens,
            rewritten=rendered.rewritten,
            open_end=layout.open_end,
            unused=rendered.unused,
        )


def _any_of(words: Iterable[str]) -> re.Pattern[str]:
    """A pattern with one group that matches the longest of these words; without words it never matches."""
    longest_first = sorted(words, key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")" if longest_first else r"((?!))")


def _covered(tokens: Tokens, spans: list[ByteSpan]) -> TokenMask:
    """Which tokens hold any byte of the spans."""
    hits: list[TokenMask] = [(tokens.starts < end) & (start < tokens.ends) for start, end in spans]
    if len(hits) == 1:
        return hits[0]
    return np.logical_or.reduce(hits) if hits else np.zeros(len(tokens.ids), np.bool_)


def agrees_with_template(encoder: Encoder, messages: Messages, encoded: Encoded, tools: Tools = ()) -> bool:
    """True if the ids equal apply_chat_template's own, as they must where no content looks like a control token."""
    is_document = messages[0]["role"] == "text"
    if encoded.refused or is_document or any(encoder.control_pattern.search(m["content"]) for m in messages):
        return True
    return bool(encoder.template.own_ids(messages, tools) == encoded.ids.tolist())
