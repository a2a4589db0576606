"""Fit encoded conversations to seq_len: truncate, split at turns, or drop, with every token in the ledger."""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from kit.config.recipe import Data
from kit.data.conversations import Conversation
from kit.data.encode import Encoded, Encoder
from kit.data.ledger import Ledger
from kit.data.places import Messages


def fit(
    conversation: Conversation, encoded: Encoded, encoder: Encoder, data: Data, ledger: Ledger
) -> Iterator[Encoded]:
    """The documents of a conversation that can be trained on, each of at most data.seq_len tokens."""
    if encoded.refused:
        ledger.drop(conversation.id, encoded.refused)
        return
    documents = [encoded]
    if len(encoded.ids) > data.seq_len and data.overlong == "split":
        documents = _split(conversation, encoded, encoder, data.seq_len)
        if len(documents) > 1:
            ledger.split(sum(len(document.ids) for document in documents) - len(encoded.ids))
    for document in documents:
        length = len(document.ids)
        ledger.read_tokens += length
        too_long = length > data.seq_len
        if too_long and data.overlong == "drop":
            ledger.drop(conversation.id, "longer than seq_len", length)
        elif not document.in_loss[1:].any():
            ledger.drop(conversation.id, "no reply in the loss", length)
        elif too_long and not _has_reply(document, data.seq_len):
            ledger.drop(conversation.id, "no reply inside seq_len", length)
        elif too_long:
            ledger.cut(length - data.seq_len)
            yield _truncate(document, data.seq_len)
        else:
            yield document


def _has_reply(document: Encoded, size: int) -> bool:
    """True if the loss counts a token of a document that is too long and will be truncated.

    The first token has no prediction, and the last is the end token that `_truncate` adds, which is not enough.
    """
    return bool(document.in_loss[1 : size - 1].any())


def _truncate(document: Encoded, size: int) -> Encoded:
    """The first size - 1 tokens and the last reply's end token, without which long replies would never end."""
    end_token = np.flatnonzero(document.in_loss)[-1:]
    ids = np.r_[document.ids[: size - 1], document.ids[end_token]]
    return Encoded(ids, np.r_[document.in_loss[: size - 1], True], document.template_tokens)


def _split(conversation: Conversation, encoded: Encoded, encoder: Encoder, size: int) -> list[Encoded]:
    """Documents of as many complete turns as fit, each after the system message; of plain text, pieces of `size`."""
    messages = conversation.messages
    if messages[0]["role"] == "text":
        starts = range(0, len(encoded.ids), size)
        return [Encoded(encoded.ids[at : at + size], encoded.in_loss[at : at + size]) for at in starts]
    questions = [index for index, message in enumerate(messages) if message["role"] == "user"]
    head = messages[: questions[0]]
    turns = [messages[start:end] for start, end in pairwise([*questions, len(messages)])]
    if len(turns) < 2:
        return [encoded]
    tools = conversation.tools
    lengths = [len(each.ids) for each in encoder([head + turn for turn in turns], [tools] * len(turns))]
    # sum(lengths) has the head once for each turn, the conversation has it once.
    head_tokens = (sum(lengths) - len(encoded.ids)) // (len(turns) - 1)
    groups: list[Messages] = []
    room = 0
    for turn, length in zip(turns, lengths, strict=True):
        if not groups or length - head_tokens > room:
            groups.append(head)
            room = size - head_tokens
        groups[-1] = [*groups[-1], *turn]
        room -= length - head_tokens
    return encoder(groups, [tools] * len(groups))
