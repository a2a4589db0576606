"""Conversations into token ids with an exact loss mask, on any chat template.

The template is rendered once with marks around each content. What lies outside the marks is structure: its control
tokens become ids. What lies inside is content: it stays text, whatever it looks like, and is what the loss counts.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kit.data.engine import Engine, Ints, Name, Tokens
from kit.errors import KitError

OPEN, CLOSE = "\ufdd0", "\ufdd1"  # noncharacters: Unicode keeps them out of all text
IGNORE = -100  # the label that cross-entropy skips
# A template that asks for today would give other ids tomorrow; this is the day that Llama 3.1's template states.
TODAY = (
    "{%- macro strftime_now(format) -%}{{ format | replace('%d', '26') | replace('%b', 'Jul') | replace('%B', 'July') "
    "| replace('%m', '07') | replace('%Y', '2024') | replace('%y', '24') | replace('%A', 'Friday') }}{%- endmacro -%}"
)

Messages = Sequence[dict[str, str]]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids of one conversation and, for each, whether the loss counts it; or why the template refused it."""

    ids: Ints
    counts: Flags
    structure: int = 0  # tokens that hold nothing of any message
    refused: str = ""

    @property
    def labels(self) -> Ints:
        """ids where the loss counts, else -100; never the first token, which nothing predicts."""
        labels = np.where(self.counts, self.ids, np.int32(IGNORE))
        labels[:1] = IGNORE
        return labels


@dataclass(slots=True)
class _Run:
    """Text between control tokens, with the bytes that are content and those that the loss counts."""

    text: str = ""
    size: int = 0
    content: list[tuple[int, int]] = field(default_factory=list)
    counted: list[tuple[int, int]] = field(default_factory=list)

    def add(self, text: str, content: bool = False, counts: bool = False) -> None:
        span = self.size, self.size + (len(text) if text.isascii() else len(text.encode()))
        self.text, self.size = self.text + text, span[1]
        if content:
            self.content.append(span)
        if counts:
            self.counted.append(span)


class _Structure(NamedTuple):
    """Template text between two contents: what joins the first, ids from control to control, what joins the second."""

    head: str
    ids: Ints
    tail: str


_Layout = list[_Run | tuple[Ints, Flags]]


class Encoder:
    """Encodes by a tokenizer's own chat template. loss: "assistant" counts replies and their end token, "all" all."""

    def __init__(self, tokenizer: Any, loss: str = "assistant", engine: Name = "tokenizers") -> None:
        if not tokenizer.is_fast:
            raise KitError(f"The tokenizer {tokenizer.name_or_path} has no fast version; choose a model that has one.")
        self.tokenizer, self.loss = tokenizer, loss
        self.engine = Engine(tokenizer, engine)
        self.control = {str(token): i for i, token in tokenizer.added_tokens_decoder.items()}
        by_length = sorted(self.control, key=len, reverse=True)
        self.splitter = re.compile("(" + "|".join(map(re.escape, by_length)) + ")")
        self.structures: dict[str, _Structure] = {}
        self.template = ""  # read at the first conversation: documents need none

    def __call__(self, conversations: Sequence[Messages]) -> list[Encoded]:
        """One Encoded a conversation; a single message of role "text" is a document and takes no template.

        Raises KitError where there is no chat template, or one that changes contents: no exact mask then.
        """
        rendered = iter(self._layouts([m for m in conversations if m[0]["role"] != "text"]))
        layouts = [self._document(m[0]) if m[0]["role"] == "text" else next(rendered) for m in conversations]
        runs = [item for layout in layouts for item in layout if isinstance(item, _Run)]
        tokens = iter(self.engine([run.text for run in runs]))
        return [self._join(layout, tokens) for layout in layouts]

    def render(self, conversations: Sequence[Messages], **options: Any) -> Any:
        """apply_chat_template, with the day pinned where the template asks for it."""
        return self.tokenizer.apply_chat_template(
            [list(m) for m in conversations], chat_template=self.template, **options
        )

    def _read_template(self) -> None:
        if not self.tokenizer.chat_template:
            raise KitError(
                f"The tokenizer {self.tokenizer.name_or_path} has no chat template; choose an instruct model, or put a "
                "chat_template.jinja beside the tokenizer."
            )
        template = str(self.tokenizer.get_chat_template())
        self.template = TODAY + template if "strftime_now" in template else template
        probe = [[{"role": "user", "content": "\n x \n"}, {"role": "assistant", "content": "y"}]]
        self.trims = "\n x \n" not in self.render(probe, tokenize=False)[0]  # Llama 3's strips contents
        if isinstance(self._layouts(probe)[0], str):
            raise KitError("The chat template changes, drops or reorders contents, so the loss mask cannot be exact.")

    def _layouts(self, chats: Sequence[Messages]) -> list[_Layout | str]:
        """Runs of text and control tokens in order, for each conversation; or why there are none."""
        from jinja2 import TemplateError

        if chats and not self.template:
            self._read_template()
        contents = [[m["content"].strip() if self.trims else m["content"] for m in messages] for messages in chats]
        marked = [
            [{"role": m["role"], "content": OPEN + c + CLOSE} for m, c in zip(messages, texts, strict=True)]
            for messages, texts in zip(chats, contents, strict=True)
        ]
        try:
            rendered = self.render(marked, tokenize=False) if chats else []
        except TemplateError as error:
            if len(chats) == 1:
                return [f"refused by the chat template: {error}"]
            return [self._layouts([messages])[0] for messages in chats]
        return [self._layout(*each) for each in zip(chats, contents, rendered, strict=True)]

    def _layout(self, messages: Messages, contents: list[str], rendered: str) -> _Layout | str:
        parts = re.split(f"[{OPEN}{CLOSE}]", rendered)
        if parts[1::2] != contents:
            return "changed by the chat template"
        layout: _Layout = []
        run, reply = _Run(), False
        for index, part in enumerate(parts):
            if index % 2:
                reply = messages[index // 2]["role"] == "assistant"
                run.add(part, content=True, counts=reply)
                continue
            found = self._structure(part)
            ends = bool(len(found.ids))
            run.add(found.head, counts=reply and ends)
            if ends:
                layout += [run, (found.ids, np.arange(len(found.ids)) < reply)]  # the first may end a reply
                run, reply = _Run(), False
                run.add(found.tail)
        return [item for item in [*layout, run] if not isinstance(item, _Run) or item.text]

    def _structure(self, part: str) -> _Structure:
        if part not in self.structures:
            head, *rest = self.splitter.split(part)
            tail = rest.pop() if rest else ""
            ids = [
                [self.control[text]] if text in self.control else self.engine([text])[0].ids for text in rest if text
            ]
            self.structures[part] = _Structure(head, np.concatenate([[], *ids]).astype(np.int32), tail)
        return self.structures[part]

    def _document(self, message: dict[str, str]) -> _Layout:
        """Plain text, all of it counted, between the BOS that the tokenizer itself adds, if it does, and EOS."""
        token = self.tokenizer
        if token.eos_token_id is None:
            raise KitError(f"The tokenizer {token.name_or_path} has no EOS token, so documents would run together.")
        run = _Run()
        run.add(message["content"], content=True, counts=True)
        added = token.backend_tokenizer.encode("").ids
        begin = [token.bos_token_id] if token.bos_token_id in added and token.bos_token_id != token.eos_token_id else []
        fixed = [(np.array(ids, np.int32), np.ones(len(ids), np.bool_)) for ids in (begin, [token.eos_token_id])]
        return [fixed[0], run, fixed[1]]

    def _join(self, layout: _Layout | str, tokens: Iterator[Tokens]) -> Encoded:
        if isinstance(layout, str):
            return Encoded(np.zeros(0, np.int32), np.zeros(0, np.bool_), refused=layout)
        ids, counts, content = [], [], 0
        for item in layout:
            if isinstance(item, _Run):
                found = next(tokens)
                ids.append(found.ids)
                inside = _covered(found, item.content)
                counts.append(inside if item.counted == item.content else _covered(found, item.counted))
                content += int(np.count_nonzero(inside))
            else:
                ids.append(item[0])
                counts.append(item[1])
        whole, counted = np.concatenate(ids), np.concatenate(counts)
        return Encoded(whole, counted | (self.loss == "all"), len(whole) - content)


def _covered(tokens: Tokens, spans: list[tuple[int, int]]) -> Flags:
    """Which tokens hold any byte of the spans."""
    hit = np.zeros(len(tokens.ids), np.bool_)
    for start, end in spans:
        hit |= (tokens.starts < end) & (start < tokens.ends)
    return hit


def agrees_with_template(encoder: Encoder, messages: Messages, encoded: Encoded) -> bool:
    """Whether the ids equal apply_chat_template's own, as they must where no content looks like a control token."""
    if encoded.refused or messages[0]["role"] == "text" or any(encoder.splitter.search(m["content"]) for m in messages):
        return True
    ids = encoder.render([messages], tokenize=True, return_dict=True)["input_ids"][0]
    return bool(list(ids) == encoded.ids.tolist())
