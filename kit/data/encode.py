"""Encoder: conversations into token ids with an exact loss mask, for any chat template.

The template is rendered once with marks around each message's content. Text outside the marks is the template's: its
control tokens become ids. Text inside is content: it stays text, even if it looks like a control token. The loss counts
the content of replies and the token that ends them.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kit.data.engine import Engine, EngineName, TokenIds, Tokens
from kit.errors import KitError

OPEN, CLOSE = "\ufdd0", "\ufdd1"  # noncharacters: Unicode keeps them out of all text
IGNORE = -100  # the label that PyTorch's cross-entropy skips
# Templates that ask for today's date would give other ids tomorrow. This is the date in Llama 3.1's template.
FIXED_DATE = (
    "{%- macro strftime_now(format) -%}{{ format | replace('%d', '26') | replace('%b', 'Jul') | replace('%B', 'July') "
    "| replace('%m', '07') | replace('%Y', '2024') | replace('%y', '24') | replace('%A', 'Friday') }}{%- endmacro -%}"
)

Messages = Sequence[dict[str, str]]
TokenMask = NDArray[np.bool_]
ByteSpan = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids of one conversation and, for each, whether the loss counts it; or why the template refused it."""

    ids: TokenIds
    in_loss: TokenMask
    template_tokens: int = 0  # tokens that hold no byte of any message
    refused: str = ""  # the reason in words, for the ledger; empty where the conversation was encoded

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
    """Ids of the template, from one control token to another, and which of them the loss counts."""

    ids: TokenIds
    in_loss: TokenMask


class _TemplateText(NamedTuple):
    """Template text between two contents: text that joins the first, ids of the control tokens, text that joins the
    second. Without control tokens, `ids` and `tail` are empty."""

    head: str
    ids: TokenIds
    tail: str


_Layout = list[_TextRun | _ControlRun]


@dataclass(frozen=True, slots=True)
class _Refused:
    """A conversation that the template cannot render."""

    reason: str


class Encoder:
    """Encodes with a tokenizer's own chat template. loss "assistant" counts replies and their end token, "all" all."""

    def __init__(self, tokenizer: Any, loss: str = "assistant", engine: EngineName = "tokenizers") -> None:
        if not tokenizer.is_fast:
            raise KitError(f"The tokenizer {tokenizer.name_or_path} has no fast version; choose a model that has one.")
        self.tokenizer, self.loss = tokenizer, loss
        self.engine = Engine(tokenizer, engine)
        self.control_ids = {str(token): token_id for token_id, token in tokenizer.added_tokens_decoder.items()}
        longest_first = sorted(self.control_ids, key=len, reverse=True)
        self.control_pattern = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")
        self.template_texts: dict[str, _TemplateText] = {}
        self.template = ""  # read at the first conversation: plain documents need none
        self.strips_content = False

    def __call__(self, conversations: Sequence[Messages]) -> list[Encoded]:
        """One Encoded per conversation; a single message of role "text" is a document and takes no template.

        Raises KitError where the tokenizer has no chat template or one that changes contents: its loss mask would not
        be exact.
        """
        rendered = iter(self._chat_layouts([m for m in conversations if m[0]["role"] != "text"]))
        layouts = [self._document_layout(m[0]) if m[0]["role"] == "text" else next(rendered) for m in conversations]
        runs = [item for layout in layouts if isinstance(layout, list) for item in layout]
        tokens = iter(self.engine([run.text for run in runs if isinstance(run, _TextRun)]))
        return [self._assemble(layout, tokens) for layout in layouts]

    def render(self, conversations: Sequence[Messages], **options: Any) -> Any:
        """apply_chat_template, with a fixed date where the template asks for today's."""
        return self.tokenizer.apply_chat_template(
            [list(messages) for messages in conversations], chat_template=self.template, **options
        )

    def _read_template(self) -> None:
        if not self.tokenizer.chat_template:
            raise KitError(
                f"The tokenizer {self.tokenizer.name_or_path} has no chat template; choose an instruct model, or put a "
                "chat_template.jinja into the tokenizer's folder."
            )
        template = str(self.tokenizer.get_chat_template())
        self.template = FIXED_DATE + template if "strftime_now" in template else template
        probe = [[{"role": "user", "content": "\n x \n"}, {"role": "assistant", "content": "y"}]]
        self.strips_content = "\n x \n" not in self.render(probe, tokenize=False)[0]  # as Llama 3's template does
        if isinstance(self._chat_layouts(probe)[0], _Refused):
            raise KitError("The chat template changes, drops or reorders contents, so the loss mask cannot be exact.")

    def _chat_layouts(self, chats: Sequence[Messages]) -> list[_Layout | _Refused]:
        """Runs of text and of control tokens in order, for each conversation."""
        from jinja2 import TemplateError

        if not chats:
            return []
        if not self.template:
            self._read_template()
        contents = [[self._content(message) for message in messages] for messages in chats]
        marked = [
            [{"role": m["role"], "content": OPEN + text + CLOSE} for m, text in zip(messages, texts, strict=True)]
            for messages, texts in zip(chats, contents, strict=True)
        ]
        try:
            rendered = self.render(marked, tokenize=False)
        except TemplateError as error:
            if len(chats) == 1:
                return [_Refused(f"refused by the chat template: {error}")]
            return [self._chat_layouts([messages])[0] for messages in chats]
        return [self._chat_layout(*each) for each in zip(chats, contents, rendered, strict=True)]

    def _content(self, message: dict[str, str]) -> str:
        return message["content"].strip() if self.strips_content else message["content"]

    def _chat_layout(self, messages: Messages, contents: list[str], rendered: str) -> _Layout | _Refused:
        pieces = re.split(f"[{OPEN}{CLOSE}]", rendered)  # template text and contents in turn
        if pieces[1::2] != contents:
            return _Refused("changed by the chat template")
        layout: _Layout = []
        run, after_reply = _TextRun(), False
        for index, piece in enumerate(pieces):
            if index % 2:
                after_reply = messages[index // 2]["role"] == "assistant"
                run.add(piece, is_content=True, in_loss=after_reply)
                continue
            found = self._template_text(piece)
            has_control = bool(len(found.ids))
            run.add(found.head, in_loss=after_reply and has_control)
            if has_control:
                in_loss = np.zeros(len(found.ids), np.bool_)
                in_loss[0] = after_reply  # the first control token after a reply ends it
                layout += [run, _ControlRun(found.ids, in_loss)]
                run, after_reply = _TextRun(), False
                run.add(found.tail)
        return [item for item in [*layout, run] if isinstance(item, _ControlRun) or item.text]

    def _template_text(self, piece: str) -> _TemplateText:
        if piece not in self.template_texts:
            head, *rest = self.control_pattern.split(piece)
            tail = rest.pop() if rest else ""
            ids = [self._control_or_text_ids(text) for text in rest if text]
            self.template_texts[piece] = _TemplateText(head, np.concatenate([[], *ids]).astype(np.int32), tail)
        return self.template_texts[piece]

    def _control_or_text_ids(self, text: str) -> Any:
        return [self.control_ids[text]] if text in self.control_ids else self.engine([text])[0].ids

    def _document_layout(self, message: dict[str, str]) -> _Layout:
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
        return [begin, run, end]

    def _assemble(self, layout: _Layout | _Refused, tokens: Iterator[Tokens]) -> Encoded:
        if isinstance(layout, _Refused):
            return Encoded(np.zeros(0, np.int32), np.zeros(0, np.bool_), refused=layout.reason)
        ids, masks, content_tokens = [], [], 0
        for item in layout:
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
        return Encoded(all_ids, in_loss | (self.loss == "all"), len(all_ids) - content_tokens)


def _covered(tokens: Tokens, spans: list[ByteSpan]) -> TokenMask:
    """Which tokens hold any byte of the spans."""
    hit = np.zeros(len(tokens.ids), np.bool_)
    for start, end in spans:
        hit |= (tokens.starts < end) & (start < tokens.ends)
    return hit


def agrees_with_template(encoder: Encoder, messages: Messages, encoded: Encoded) -> bool:
    """True if the ids equal apply_chat_template's own, as they must where no content looks like a control token."""
    is_document = messages[0]["role"] == "text"
    if encoded.refused or is_document or any(encoder.control_pattern.search(m["content"]) for m in messages):
        return True
    ids = encoder.render([messages], tokenize=True, return_dict=True)["input_ids"][0]
    return bool(list(ids) == encoded.ids.tolist())
