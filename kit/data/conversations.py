"""Conversation: the one row type of this package, and a converter from each format that people have."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Any

from kit.data import keys, oasst

Row = dict[str, Any]
# role and content; of replies also tool_calls, the reasoning under a key of REASONING_KEYS, and train: False where the
# loss leaves them out; of tools also name and tool_call_id.
Message = dict[str, Any]

ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {
    "prompter": "user",  # OASST
    "human": "user",  # ShareGPT, and its names for assistants (FastChat, fastchat/data/clean_sharegpt.py)
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard"), "assistant"),
    "function": "tool",  # OpenAI's name before tools
    "developer": "system",  # OpenAI's name for models that reason
}
_PLAIN_KEYS = frozenset({"role", "content", "from", "value"})
_SHOWN_CHARACTERS = 40  # of a value that a reason names


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
    tools: tuple[Row, ...] = ()  # descriptions of the functions that a reply may call
    unused: tuple[str, ...] = ()  # keys of the row, and "message.KEY", that other tools train by and the kit does not

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
    known = FORMATS[source_format]
    messages = tuple(known.messages(row, lang))
    if source_format != "text":
        _check_order([message["role"] for message in messages])
    if source_format not in ("text", "oasst_trees", "oasst_messages"):
        _check_meaning(row, messages)
    tree, group = (_scalar(row.get(key)) for key in ("message_tree_id", "group"))
    return Conversation(
        row_id(row, name),
        tree or group or _prompt_key(messages),
        messages,
        split,
        _scalar(first_message.get("lang")),
        _tools(row) if keys.TOOL_KEYS[0] in known.reads else (),
        _unused(row, known, messages),
    )


def _unused(row: Row, known: "Format", messages: tuple[Message, ...]) -> tuple[str, ...]:
    """The keys that training does not use, of which most rows have none."""
    turns = _turns(row)
    return keys.unused(row, turns, _reads(row, known, messages)) if turns or keys.counted(row) else ()


def _reads(row: Row, known: "Format", messages: tuple[Message, ...]) -> set[str]:
    """The keys of the row whose values are in the conversation."""
    system = _system_key(row) if known.reads & set(keys.SYSTEM_KEYS) else ""
    is_used = system and messages[0]["role"] == "system" and messages[0]["content"] == row[system]
    honoured = {key for key in keys.WEIGHTS if row.get(key) == keys.WEIGHTS[key][1]}
    honoured |= {key for key in keys.GOOD if row.get(key) is True}
    return set(known.reads - set(keys.SYSTEM_KEYS)) | honoured | ({system} if is_used else set())


def _check_meaning(row: Row, messages: tuple[Message, ...]) -> None:
    """Raises Rejected for a row that no reply should be learnt from, or whose text is not all of it."""
    for key in keys.GOOD:
        if row.get(key) is False:
            raise Rejected(f"{key} false: an answer to avoid")
    if outside := keys.leaves_out(row):
        raise Rejected(f"{outside}: the row is not trained on")
    replies = [message for message in messages if message["role"] == "assistant"]
    if not any(message.get("train", True) for message in replies):
        raise Rejected("every reply has weight 0")
    media = [key for key in (*keys.MEDIA_LISTS, *keys.MEDIA_SINGLE) if key in row and not keys.is_empty(row[key])]
    if any(key in keys.MEDIA_LISTS for key in media) or (
        media and any(keys.MEDIA_TOKEN.search(message["content"]) for message in messages)
    ):
        raise Rejected(f"image or other non-text content ({media[0]})")


def _turns(row: Row) -> list[Row]:
    """The messages of a chat row that may have more keys than a role and a content."""
    lists = [
        row[key] for key in ("messages", "conversations", "prompt", "completion") if isinstance(row.get(key), list)
    ]
    return [turn for turns in lists for turn in turns if isinstance(turn, dict) and not turn.keys() <= _PLAIN_KEYS]


def row_id(row: Any, name: str) -> str:
    """The row's id for reports, else `name`."""
    keys = ("message_id", "message_tree_id", "id") if isinstance(row, dict) else ()
    return next((found for key in keys if (found := _scalar(row.get(key)))), name)


def _scalar(value: Any) -> str:
    if value is None:  # as most are
        return ""
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
    return {"role": _known_role(role), "content": _text(content)}


def _known_role(role: Any) -> str:
    if isinstance(role, str) and role in ROLES:
        return ROLES[role]
    if role is None:
        raise Rejected("message without a role")
    raise Rejected(f"unknown role {str(role)[:_SHOWN_CHARACTERS].encode(errors='backslashreplace').decode()!r}")


def _text(content: Any) -> str:
    """The content unchanged; a list of texts or of text parts is joined."""
    if isinstance(content, list):
        content = "".join(map(_part, content))
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


def _part(part: Any) -> str:
    if isinstance(part, dict):
        kind = part.get("type", "text")
        if kind not in ("text", "input_text", "output_text"):
            is_text = isinstance(part.get("text"), str) or kind in keys.REASONING_KEYS
            named = (
                f"content of type {str(kind)[:_SHOWN_CHARACTERS]!r}" if is_text else "image or other non-text content"
            )
            raise Rejected(named)
        part = next((part[key] for key in ("text", "value", "content") if part.get(key) is not None), "")
    if not isinstance(part, str):
        raise Rejected("content is not text")
    return part


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
    if not isinstance(turn, dict):
        return None
    return turn.get("from") if turn.get("role") in (None, "") else turn["role"]


def _turn(turn: Any) -> Message:
    """A message of role/content or from/value, with what else of it is trained on."""
    if not isinstance(turn, dict):
        raise Rejected("message is not an object")
    content = turn.get("content")
    content = turn.get("value") if content is None else content
    if turn.keys() <= _PLAIN_KEYS:
        return _message(_role(turn), content)
    role = _known_role(_role(turn))
    calls = _calls(turn) if role == "assistant" else []
    message: Message = {"role": role, "content": "" if calls and keys.is_empty(content) else _text(content)}
    if calls:
        message["tool_calls"] = calls
    if role == "assistant":
        reasoning = next((key for key in keys.REASONING_KEYS if not keys.is_empty(turn.get(key))), "")
        if reasoning:
            message[reasoning] = _text(turn[reasoning])
        if keys.leaves_out(turn):
            message["train"] = False
    if role == "tool":
        message |= {key: turn[key] for key in keys.TURN_KEYS if isinstance(turn.get(key), str)}
    return message


def _calls(turn: Row) -> list[Row]:
    """tool_calls as templates take them: objects, with their arguments as objects too. Raises Rejected."""
    calls = _from_json(turn.get("tool_calls"))
    if keys.is_empty(calls):
        function = _from_json(turn.get("function_call"))
        calls = [] if keys.is_empty(function) else [{"type": "function", "function": function}]
    if not isinstance(calls, list):
        raise Rejected("tool calls are not a list")
    made = []
    for call in map(_without_nulls, map(_from_json, calls)):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise Rejected("tool call without a function's name")
        function = function | {"arguments": _from_json(function.get("arguments", {}))}
        made.append({"type": "function", **call, "function": function} if "function" in call else function)
    return made


def _tools(row: Row) -> tuple[Row, ...]:
    """The row's descriptions of functions. Raises Rejected where they are not a list of objects."""
    key = next((key for key in keys.TOOL_KEYS if key in row and not keys.is_empty(row[key])), "")
    if not key:
        return ()
    tools = _from_json(row[key])
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Rejected("tools are not a list of objects")
    tools = [_without_nulls(tool) for tool in tools]
    return tuple(tool if "function" in tool else {"type": "function", "function": tool} for tool in tools)


def _from_json(value: Any) -> Any:
    """An object or a list that is given as JSON text; any other value unchanged."""
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _without_nulls(value: Any) -> Any:
    """Tables give each object all keys of all rows, null where it has none."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _system_key(row: Row) -> str:
    return next((key for key in keys.SYSTEM_KEYS if key in row and not keys.is_empty(row[key])), "")


def _system(row: Row) -> list[Message]:
    key = _system_key(row)
    return [_message("system", row[key])] if key else []


def _alpaca(row: Row, lang: str) -> list[Message]:
    """What is not empty of instruction and input, joined by a line break; history as pairs.

    As LLaMA-Factory does (data/converter.py).
    """
    asked = [_text(row[key]) for key in ("instruction", "input") if not _is_blank(row.get(key))]
    pairs: Any = [] if keys.is_empty(row.get("history")) else row["history"]
    if not isinstance(pairs, list) or any(not isinstance(pair, list) or len(pair) != 2 for pair in pairs):
        raise Rejected("history is not pairs")
    turns = [*pairs, ("\n".join(asked), row.get("output"))]
    messages = [(_message("user", question), _message("assistant", reply)) for question, reply in turns]
    return _system(row) + [message for pair in messages for message in pair]


def _is_blank(value: Any) -> bool:
    return keys.is_empty(value) or (isinstance(value, str) and value.isspace())


def _completion(row: Row, lang: str) -> list[Message]:
    messages: list[Message] = []
    for role, content in (("user", row.get("prompt")), ("assistant", row.get("completion"))):
        if isinstance(content, list) and any(isinstance(turn, dict) and _role(turn) for turn in content):
            messages += [_turn(turn) for turn in content]
        else:
            messages.append(_message(role, content))
    return messages if messages[0]["role"] == "system" else _system(row) + messages


def _document(row: Row, lang: str) -> list[Message]:
    text = row.get("text")
    return [{"role": "text", "content": _text(row.get("content") if text is None else text)}]


@dataclass(frozen=True)
class Format:
    """How to recognise rows of a format, and how to turn one into messages."""

    keys: str
    fits: Callable[[Row], bool]
    messages: Callable[[Row, str], list[Message]]
    reads: frozenset[str] = frozenset()  # of the keys in kit.data.keys, those of the row that are used


def _turns_have(row: Row, key: str) -> bool:
    turns = row.get("conversations")
    return isinstance(turns, list) and bool(turns) and isinstance(turns[0], dict) and bool(turns[0].get(key))


_CHAT_KEYS = frozenset({*keys.SYSTEM_KEYS, *keys.TOOL_KEYS})
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
        _CHAT_KEYS,
    ),
    "sharegpt": Format("`conversations` of `from` and `value`", lambda r: _turns_have(r, "from"), _chat, _CHAT_KEYS),
    "alpaca": Format(
        "`instruction` and `output`",
        lambda r: "instruction" in r and "output" in r,
        _alpaca,
        _CHAT_KEYS,
    ),
    "prompt_completion": Format(
        "`prompt` and `completion`", lambda r: "prompt" in r and "completion" in r, _completion, _CHAT_KEYS
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
    | keys.COLUMNS
)
