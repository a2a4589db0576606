"""Turns: each reply's part of the template's text, found by rendering the conversation up to it.

For templates that write one message as several turns, or several messages as one, as those of gpt-oss and Gemma 4 do
with tool calls. The text in front of a reply is what the model sees when it begins the reply at inference.
"""

import re
from collections.abc import Callable, Sequence

from kit.data.keys import REASONING_KEYS
from kit.data.places import Message, Messages, Piece, Rendered, called_names

Render = Callable[[Messages, bool], str]  # text of the messages, with the generation prompt or without; "" on an error


def replies_by_prefix(
    render: Render, messages: Messages, shown: Messages, text: str, control: re.Pattern[str], special: re.Pattern[str]
) -> Rendered | None:
    """The pieces of `text`; None where a reply has no part that is certain, or a message has a special token."""
    if any(map(special.search, _words(messages))):
        return None
    pieces: list[Piece] = []
    at, rewritten = 0, any(m["content"].strip() not in text for m in messages if m["role"] != "assistant")
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(shown[:index], True)
        start = len(before)
        end = _end(text, render(shown[: index + 1], False), control)
        reply = text[start:end]
        said = [message["content"].strip(), *called_names(message)]
        if start <= at or not text.startswith(before) or not all(words in reply for words in said):
            return None
        rewritten |= any(message[key].strip() not in reply for key in REASONING_KEYS if key in message)
        in_loss = bool(message.get("train", True))
        pieces += [Piece(text[at:start]), Piece(reply, True, in_loss, is_turn=True, left_out=not in_loss)]
        at = end
    return Rendered([*pieces, Piece(text[at:])], rewritten=rewritten)


def without_reasoning(messages: Messages) -> Messages:
    """The messages as a template shows them that leaves the reasoning of earlier turns out."""
    return [{key: value for key, value in m.items() if key not in REASONING_KEYS} for m in messages]


def _words(messages: Sequence[Message]) -> list[str]:
    return [message[key] for message in messages for key in ("content", *REASONING_KEYS) if message.get(key)]


def _end(text: str, prefix: str, control: re.Pattern[str]) -> int:
    """Where the reply ends at which `prefix` ends: in front of the control token at its end.

    The last reply of a conversation may have another end token than the earlier ones: that is where the texts differ.
    """
    pairs = enumerate(zip(text, prefix, strict=False))
    common = next((at for at, (ours, theirs) in pairs if ours != theirs), min(len(text), len(prefix)))
    if common == len(prefix):
        found = list(control.finditer(text, 0, common))
        is_last = bool(found) and not text[found[-1].end() : common].strip()
        return found[-1].start() if is_last else common
    return next((match.start() for match in control.finditer(text) if match.start() <= common < match.end()), 0)
