"""Conversations from what people have: OASST trees or flat messages, and chat files. One row type inside."""

import gzip
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit import files
from kit.errors import InputError

ROLES = {"prompter": "user", "human": "user", "gpt": "assistant"}


@dataclass(frozen=True)
class Conversation:
    """Messages {role, content} in order. group is the tree that it comes from: a split never divides a group."""

    id: str
    group: str
    messages: tuple[dict[str, str], ...]
    split: str = ""  # the dataset's own, where it has one


def read(source: str, lang: str = "") -> tuple[list[Conversation], str]:
    """Conversations from a file, a folder or a hub id, and the reason for the format that was seen.

    Files: .jsonl or .jsonl.gz of OASST trees, of OASST messages, or of rows with `messages`.
    Raises InputError that says what was looked for and where.
    """
    paths = source_files(source)
    if not paths:
        return _read_hub(source, lang)
    rows = [row for path in paths for row in _json_lines(path)]
    return _from_rows(rows, str(source), lang)


def source_files(source: str) -> list[Path]:
    """The files that a source stands for; none for a hub id. Raises InputError for an empty folder."""
    path = files.locate(source)
    if path.is_file():
        return [path]
    if path.is_dir():
        if found := sorted(p for p in path.iterdir() if p.name.endswith((".jsonl", ".jsonl.gz"))):
            return found
        raise InputError(f"Data {source!r}: the folder holds no .jsonl or .jsonl.gz file.")
    return []


def _json_lines(path: Path) -> Iterator[Any]:
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                try:
                    yield json.loads(line)
                except ValueError as error:
                    raise InputError(f"{path}, line {number}: not valid JSON ({error}).") from None


def _from_rows(rows: list[Any], where: str, lang: str, split: str = "") -> tuple[list[Conversation], str]:
    first = rows[0] if rows else None
    if not isinstance(first, dict):
        raise InputError(f"Data {where!r} holds no rows.")
    if "prompt" in first and "message_tree_id" in first:
        return _best_paths(rows, lang, split), "OASST trees: rows have `prompt` and `message_tree_id`"
    if "parent_id" in first or "message_id" in first:
        return _best_paths(_trees(rows), lang, split), "OASST messages: rows have `message_id`, joined into trees"
    if "messages" in first:
        chats = [_chat(row, i, split) for i, row in enumerate(rows)]
        return chats, "chat: rows have `messages`"
    raise InputError(
        f"Data {where!r}: rows have the keys {', '.join(first)}; known formats have `prompt` with `message_tree_id` "
        "(OASST trees), `message_id` (OASST messages) or `messages` (chat)."
    )


def _read_hub(source: str, lang: str) -> tuple[list[Conversation], str]:
    import datasets

    try:
        loaded = datasets.load_dataset(source)
    except Exception as error:  # offline, no such data set, no licence accepted: the library's own words follow
        cache = datasets.config.HF_DATASETS_CACHE
        raise InputError(
            f"Data {source!r} not found: there is no such file or folder, and as a hub id it is neither in the cache "
            f"{cache} nor could it be fetched ({str(error).splitlines()[0]}). Set data.source to a file or folder, "
            "or HF_HOME to a cache that holds it."
        ) from None
    out, reason = [], ""
    for name, rows in loaded.items():
        found, reason = _from_rows(list(rows), source, lang, split="eval" if name != "train" else "train")
        out += found
    return out, reason


def _chat(row: dict[str, Any], index: int, split: str) -> Conversation:
    messages = tuple(_message(m.get("role"), m.get("content")) for m in row["messages"])
    key = str(row.get("id") or index)
    return Conversation(key, str(row.get("group") or key), messages, split)


def _message(role: Any, content: Any) -> dict[str, str]:
    return {"role": ROLES.get(role, str(role)), "content": content if isinstance(content, str) else ""}


def _trees(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Flat messages into nested trees, in the order of their roots."""
    nodes = {row["message_id"]: dict(row, replies=[]) for row in rows}
    for node in nodes.values():
        if (parent := node.get("parent_id")) in nodes:
            nodes[parent]["replies"].append(node)
    for node in nodes.values():
        if not node.get("parent_id"):
            yield {"message_tree_id": node.get("message_tree_id") or node["message_id"], "prompt": node}


def _best_paths(trees: Iterable[dict[str, Any]], lang: str, split: str) -> list[Conversation]:
    found = ((str(tree["message_tree_id"]), best_path(tree["prompt"], lang)) for tree in trees)
    return [
        Conversation(key, key, tuple(_message(node["role"], node["text"]) for node in path), split)
        for key, path in found
        if path
    ]


def best_path(root: dict[str, Any], lang: str = "") -> list[dict[str, Any]]:
    """The longest path that takes the best-ranked assistant reply at each branch and ends in a reply; else empty.

    rank 0 is best (Open-Assistant's ranked pairs); where filtering removed it, the best that is left counts. Unranked
    siblings come after ranked ones, oldest first. Ties between paths go to more characters, then to the smaller id.
    """
    if not _survives(root, lang):
        return []
    paths = [path[:-1] if path[-1]["role"] == "prompter" else path for path in _paths(root, lang)]
    return min(paths, key=lambda p: (-len(p), -sum(len(n["text"]) for n in p), p[-1]["message_id"] if p else ""))


def _survives(node: dict[str, Any], lang: str) -> bool:
    return not node.get("deleted") and bool(node.get("text")) and (not lang or node.get("lang") == lang)


def _paths(node: dict[str, Any], lang: str) -> Iterator[list[dict[str, Any]]]:
    replies = [r for r in node.get("replies") or [] if _survives(r, lang)]
    if node["role"] == "prompter":
        replies = sorted(replies, key=_preference)[:1]
    if not replies:
        yield [node]
    for reply in replies:
        for tail in _paths(reply, lang):
            yield [node, *tail]


def _preference(node: dict[str, Any]) -> tuple[float, str, str]:
    rank = node.get("rank")
    return (float("inf") if rank is None else rank, node.get("created_date") or "", node["message_id"])
