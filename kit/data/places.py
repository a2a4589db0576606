"""Places: where each message of a conversation is in the template's text, found by marks in its messages."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kit.data.keys import REASONING_KEYS

Message = dict[str, Any]
Messages = Sequence[Message]

# Noncharacters: Unicode keeps them out of all text. A pair each for replies, for other messages, and for what a reply
# has in addition to its content: reasoning and names of called functions.
REPLY, OTHER, EXTRA = "\ufdd0\ufdd1", "\ufdd2\ufdd3", "\ufdd4\ufdd5"
MARK = re.compile("([\ufdd0-\ufdd5])")
LAST_TAG = re.compile(r"(?s).*(?:</[\w:.-]+>|\[/[A-Z_]+\])")  # up to the end tag of the reasoning before an answer


class Piece(NamedTuple):
    """Text of the template, or of a message. A turn is a reply with control tokens of the template inside."""

    text: str
    is_content: bool = False
    in_loss: bool = False
    is_turn: bool = False
    left_out: bool = False  # a reply of weight 0


class Rendered(NamedTuple):
    """The pieces of one conversation, or the reason why it is refused."""

    pieces: Sequence[Piece] = ()
    refused: str = ""
    rewritten: bool = False  # a message is not in the text word for word, or not in its place
    unused: tuple[str, ...] = ()  # keys that the template does not take


class _Region(NamedTuple):
    """Marked text: the marks, and its bounds in the text without marks."""

    marks: str
    start: int
    end: int


def without_marks(text: str) -> str:
    """The text that the template writes without marks."""
    return MARK.sub("", text)


def marked(text: str, marks: str) -> str:
    """The text between a pair of marks."""
    return marks[0] + text + marks[1]


def _words(content: str) -> tuple[str, str]:
    """The content without white space at its ends, as (reasoning and its end tag, answer)."""
    core = content.strip()
    tag = LAST_TAG.match(core)
    answer = core[tag.end() :].lstrip() if tag else core
    return (core[: len(core) - len(answer)], answer) if answer else ("", core)


def mark_message(message: Message, words_only: bool) -> Message:
    """The message with marks around its content, or around the words of it that templates do not strip."""
    content, marks = message["content"], REPLY if message["role"] == "assistant" else OTHER
    shown = dict(message)
    if content:
        inner = content
        if words_only:
            inner = _words(content)[1] if marks == REPLY else content.strip()
        start = content.rindex(inner)
        shown["content"] = content[:start] + marked(inner, marks) + content[start + len(inner) :]
    for key in REASONING_KEYS:
        if key in message:
            inner = message[key].strip()
            start = message[key].index(inner)
            shown[key] = message[key][:start] + marked(inner, EXTRA) + message[key][start + len(inner) :]
    if "tool_calls" in message:
        shown["tool_calls"] = [_mark_call(call) for call in message["tool_calls"]]
    return shown


def _mark_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    function = function | {"name": marked(function["name"], EXTRA)}
    return call | {"function": function} if "function" in call else function


def called_names(message: Message) -> Iterable[str]:
    """Names of the functions that a reply calls."""
    return (call.get("function", call)["name"] for call in message.get("tool_calls", ()))


class _Span(NamedTuple):
    start: int
    end: int
    piece: Piece


@dataclass(frozen=True)
class Surroundings:
    """What the template writes around replies. `around` are its texts for neutral contents, None where not known."""

    around: list[str] | None
    generation_prompt: str
    end_token: str
    control: re.Pattern[str]
    special: re.Pattern[str]


class Placement:
    """Places of one conversation's messages in its text, from the text with marks.

    `shown` are the messages as the template took them, `messages` the same with their weights.
    """

    def __init__(self, messages: Messages, shown: Messages, marked_text: str, surroundings: Surroundings) -> None:
        self.messages, self.shown, self.surroundings = messages, shown, surroundings
        self.text, self.regions = without_marks(marked_text), _regions(marked_text)
        self.rewritten = False

    def pieces(self) -> Rendered | None:
        """None where a reply is not found exactly once, in order, with its own words."""
        if self.regions is None:
            return None
        others = [region for region in self.regions if region.marks == OTHER]
        spans = [_Span(region.start, region.end, Piece(self._text(region), True)) for region in others]
        if not self._others_are_safe(others):
            return None
        replies = self._regions_of_replies()
        if replies is None:
            return None
        for index, regions in replies.items():
            span = self._reply_span(index, regions)
            if span is None:
                return None
            spans.append(span)
        return self._joined(sorted(spans))

    def _joined(self, spans: Sequence[_Span]) -> Rendered | None:
        pieces, at = [], 0
        for span in spans:
            if span.start < at:
                return None
            pieces += [Piece(self.text[at : span.start]), span.piece]
            at = span.end
        return Rendered([*pieces, Piece(self.text[at:])], rewritten=self.rewritten)

    def _text(self, region: _Region) -> str:
        return self.text[region.start : region.end]

    def _others_are_safe(self, regions: Sequence[_Region]) -> bool:
        """Whether no control token can come from the content of a message that has no place."""
        contents = [m["content"].strip() for m in self.messages if m["role"] != "assistant" and m["content"]]
        found = [self._text(region).strip() for region in regions]
        self.rewritten = found != contents
        return len(found) == len(contents) or not any(map(self.surroundings.special.search, contents))

    def _regions_of_replies(self) -> dict[int, list[_Region]] | None:
        """The regions of each reply by its message's index; only reasoning may be missing."""
        expected = []
        for index, message in enumerate(self.shown):
            if message["role"] != "assistant":
                continue
            expected += [(index, EXTRA, message[key].strip(), True) for key in REASONING_KEYS if key in message]
            if message["content"]:
                expected.append((index, REPLY, message["content"], False))
            expected += [(index, EXTRA, name, False) for name in called_names(message)]
        found: dict[int, list[_Region]] = {}
        remaining = iter(expected)
        for region in self.regions or ():
            if region.marks == OTHER:
                continue
            for index, marks, words, may_miss in remaining:
                if region.marks == marks and self._text(region) in (words, _words(words)[1]):
                    found.setdefault(index, []).append(region)
                    break
                if not may_miss:
                    return None
                self.rewritten = True
            else:
                return None
        left = list(remaining)
        self.rewritten |= bool(left)
        return found if all(may_miss for *_, may_miss in left) else None

    def _reply_span(self, index: int, regions: Sequence[_Region]) -> _Span | None:
        message = self.messages[index]
        in_loss = bool(message.get("train", True))
        if any(region.marks == EXTRA for region in regions):
            return self._turn_span(index, regions, in_loss)
        (region,) = regions
        start, content = region.start, message["content"]
        before = content[: content.rindex(self._text(region))]
        if before and not before.isspace():
            before = before.lstrip()
            if self.text.endswith(before, 0, start):
                start -= len(before)
            else:  # the reasoning of an earlier turn, which templates leave out
                self.rewritten = True
                if self.surroundings.special.search(before):
                    return None
        elif before and (header := self._header(index)) and self.text.endswith(header + before, 0, start):
            start -= len(before)
        return _Span(start, region.end, Piece(self.text[start : region.end], True, in_loss, left_out=not in_loss))

    def _header(self, index: int) -> str | None:
        """What the template writes in front of this message where its content is neutral."""
        around = self.surroundings.around
        return around[index] if around else None

    def _turn_span(self, index: int, regions: Sequence[_Region], in_loss: bool) -> _Span | None:
        """All between the header and the token that ends a reply."""
        said = [str(self.messages[index].get(key, "")) for key in ("content", *REASONING_KEYS)]
        if any(map(self.surroundings.special.search, said)):
            return None
        before = max((r.end for r in self.regions or () if r.end <= regions[0].start), default=0)
        following = min((r.start for r in self.regions or () if r.start >= regions[-1].end), default=len(self.text))
        start = self._turn_start(index, before, regions[0].start)
        end_token = self._end_token(index)
        is_last = index == len(self.messages) - 1
        end = self.text.find(end_token, regions[-1].end, following) if end_token else -1
        if end < 0 and is_last and not end_token:
            end = len(self.text)
        if start < 0 or end < 0:
            return None
        return _Span(start, end, Piece(self.text[start:end], True, in_loss, True, not in_loss))

    def _end_token(self, index: int) -> str:
        """The first control token behind this message where its content is neutral."""
        around = self.surroundings.around
        behind = self.surroundings.control.search(around[index + 1]) if around else None
        return behind.group() if behind else self.surroundings.end_token

    def _turn_start(self, index: int, low: int, high: int) -> int:
        """The end of the last header in this part of the text, -1 without one."""
        header = self._header(index) or ""
        control_ends = [match.end() for match in self.surroundings.control.finditer(header)]
        shorter = header[: control_ends[-1]] if control_ends else ""
        for words in (self.surroundings.generation_prompt, header, shorter):
            at = self.text.rfind(words, low, high) if words else -1
            if at >= 0:
                return at + len(words)
        return -1


def _regions(marked: str) -> list[_Region] | None:
    """Marked texts in order; None where marks are nested, doubled or not paired."""
    regions: list[_Region] = []
    at, start, open_marks = 0, 0, ""
    for part in MARK.split(marked):
        if not MARK.fullmatch(part):
            at += len(part)
            continue
        marks = next(pair for pair in (REPLY, OTHER, EXTRA) if part in pair)
        if part == marks[0] and not open_marks:
            start, open_marks = at, marks
        elif part == marks[1] and open_marks == marks:
            regions.append(_Region(marks, start, at))
            open_marks = ""
        else:
            return None
    return None if open_marks else regions
