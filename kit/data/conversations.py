"""Conversation: the one row type of this package, and a converter from each format that people have."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Any

from kit.data import oasst

Row = dict[str, Any]
Message = dict[str, str]

ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {
    "prompter": "user",  # OASST
    "human": "user",  # ShareGPT, and its names for assistants (FastChat, fastchat/data/clean_sharegpt.py)
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard"), "assistant"),
}


class Rejected(Exception):  # noqa: N818 - not an error: a row that is counted and left out
    """Why a row is not used: a short, stable phrase."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages {role, content} in order; a plain-text document is one message of role "text"."""

    id: str  # the row's id, else "<file name>:<line or row number>"
    group: str  # a split never divides a group: the OASST tree, the row's own `group`, else the prompt
    messages: tuple[Message, ...]
    split: str = ""  # "train" or "eval" where the dataset has its own
    lang: str = ""

    def prompt_key(self) -> str:
        """Digest of everything before the first reply; of the whole text where there is none."""
        return _prompt_key(self.messages)


def _prompt_key(messages: Iterable[Message]) -> str:
    total = blake2b(digest_size=16)
    for message in messages:
        if message["role"] == "assistant":
            break
        total.update(f"{message['role']}\0{message['content']}\0".encode())
    return total.hexdigest()


def convert(row: Any, source_format: str, name: str, lang: str = "", split: str = "") -> Conversation:
    """The row as a conversation; its id is `name` if the row has none. Raises Rejected with the reason."""
    if not isinstance(row, dict):
        raise Rejected("not an object")
    first_message = row["prompt"] if isinstance(row.get("prompt"), dict) else row
    if lang and first_message.get("lang") not in (None, "", lang):
        raise Rejected("other language")
    messages = tuple(FORMATS[source_format].messages(row, lang))
    if source_format != "text":
        _check_order([message["role"] for message in messages])
    tree, group = (_scalar(row.get(key)) for key in ("message_tree_id", "group"))
    return Conversation(
        row_id(row, name), tree or group or _prompt_key(messages), messages, split, _scalar(first_message.get("lang"))
    )


def row_id(row: Any, name: str) -> str:
    """The row's id for reports, else `name`."""
    keys = ("message_id", "message_tree_id", "id") if isinstance(row, dict) else ()
    return next((found for key in keys if (found := _scalar(row.get(key)))), name)


def _scalar(value: Any) -> str:
    text = str(value) if isinstance(value, str | int) else ""
    return text.encode(errors="backslashreplace").decode()  # a lone surrogate cannot be written as UTF-8


def _check_order(roles: Sequence[str]) -> None:
    if "assistant" not in roles:
        raise Rejected("no reply")
    if any(role == following != "tool" for role, following in pairwise(roles)):  # several tools may answer one call
        raise Rejected("two messages of one role in a row")
    if "user" not in roles[: roles.index("assistant")] or "system" in roles[1:]:
        raise Rejected("roles out of order")


def _message(role: Any, content: Any) -> Message:
    if not isinstance(role, str) or role not in ROLES:
        raise Rejected("unknown role")
    return {"role": ROLES[role], "content": _text(content)}


def _text(content: Any) -> str:
    """The content unchanged; a list of text parts is joined."""
    if isinstance(content, list):
        if any(not isinstance(part, dict) or part.get("type") != "text" for part in content):
            raise Rejected("image or other non-text content")
        content = "".join(_text(part.get("text")) for part in content)
    if content is not None and not isinstance(content, str):
        raise Rejected("content is not text")
    if not content or content.isspace():
        raise Rejected("empty message")
    if "\0" in content:
        raise Rejected("NUL character")
    try:
        content.encode()
    except UnicodeEncodeError:
        raise Rejected("lone surrogate") from None
    return content


def _tree(row: Row, lang: str) -> list[Message]:
    if reason := oasst.unusable(row.get("prompt"), lang):
        raise Rejected(reason)
    return [_message(node.get("role"), node["text"]) for node in oasst.best_path(row["prompt"], lang)]


def _chat(row: Row, lang: str) -> list[Message]:
    turns = row.get("messages") or row.get("conversations")
    if not isinstance(turns, list):
        raise Rejected("no messages")
    messages = _system(row) if not turns or _role(turns[0]) != "system" else []
    return messages + [_turn(turn) for turn in turns]


def _role(turn: Any) -> Any:
    return (turn.get("role") or turn.get("from")) if isinstance(turn, dict) else None


def _turn(turn: Any) -> Message:
    """A message of role/content or from/value."""
    if not isinstance(turn, dict):
        raise Rejected("message is not an object")
    if turn.get("tool_calls"):
        raise Rejected("tool calls")
    content = turn.get("content")
    return _message(_role(turn), turn.get("value") if content is None else content)


def _system(row: Row) -> list[Message]:
    return [_message("system", row["system"])] if row.get("system") else []


def _alpaca(row: Row, lang: str) -> list[Message]:
    """instruction and input joined by a line break; history as pairs (LLaMA-Factory, data/converter.py)."""
    query = _text(row.get("instruction"))
    if str(row.get("input") or "").strip():
        query += "\n" + _text(row["input"])
    pairs = row.get("history") or []
    if not isinstance(pairs, list) or any(not isinstance(pair, list) or len(pair) != 2 for pair in pairs):
        raise Rejected("history is not pairs")
    turns = [*pairs, (query, row.get("output"))]
    messages = [(_message("user", question), _message("assistant", reply)) for question, reply in turns]
    return _system(row) + [message for pair in messages for message in pair]


def _completion(row: Row, lang: str) -> list[Message]:
    messages: list[Message] = []
    for role, content in (("user", row.get("prompt")), ("assistant", row.get("completion"))):
        messages += [_turn(turn) for turn in content] if isinstance(content, list) else [_message(role, content)]
    return messages


def _document(row: Row, lang: str) -> list[Message]:
    text = row.get("text")
    return [{"role": "text", "content": _text(row.get("content") if text is None else text)}]


@dataclass(frozen=True)
class Format:
    """How to recognise rows of a format, and how to turn one into messages."""

    keys: str
    fits: Callable[[Row], bool]
    messages: Callable[[Row, str], list[Message]]


def _turns_have(row: Row, key: str) -> bool:
    turns = row.get("conversations")
    return isinstance(turns, list) and bool(turns) and isinstance(turns[0], dict) and bool(turns[0].get(key))


# The first that fits is taken: OASST messages have `text` too.
FORMATS = {
    "oasst_trees": Format(
        "`prompt` and `message_tree_id`", lambda r: isinstance(r.get("prompt"), dict) and "message_tree_id" in r, _tree
    ),
    "oasst_messages": Format("`message_id` and `text`", lambda r: "message_id" in r and "text" in r, _tree),
    "messages": Format(
        "`messages`, or `conversations` of `role` and `content`",
        lambda r: isinstance(r.get("messages"), list) or _turns_have(r, "role"),
        _chat,
    ),
    "sharegpt": Format("`conversations` of `from` and `value`", lambda r: _turns_have(r, "from"), _chat),
    "alpaca": Format("`instruction` and `output`", lambda r: "instruction" in r and "output" in r, _alpaca),
    "prompt_completion": Format(
        "`prompt` and `completion`", lambda r: "prompt" in r and "completion" in r, _completion
    ),
    "text": Format(
        "`text` or `content`",
        lambda r: "role" not in r and any(isinstance(r.get(key), str) for key in ("text", "content")),
        _document,
    ),
}
# The columns that the converters read; other columns of a table are not decoded.
COLUMNS = frozenset(
    {"id", "group", "lang", "message_tree_id", "prompt", "message_id", "parent_id", "text", "role", "rank", "deleted"}
    | {"created_date", "review_result", "messages", "conversations", "system", "instruction", "input", "output"}
    | {"history", "completion", "content"}
)
