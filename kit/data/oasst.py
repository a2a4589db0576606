"""OASST trees: flat messages joined into them, and the best path through one."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

Node = dict[str, Any]  # a message with its `replies`
Place = TypeVar("Place")


def join(rows: Iterable[tuple[Place, Any]], reject: Callable[[Place, Any, str], None]) -> Iterator[tuple[Place, Node]]:
    """Flat messages joined into nested trees, each with the place of its root, in the order of the roots.

    A message is rejected if its id was seen before, its parent is missing, or its parents form a circle.
    """
    nodes: dict[str, tuple[Place, Node]] = {}
    for place, row in rows:
        key = _id(row) if isinstance(row, dict) else ""
        if not key or key in nodes:
            reject(place, row, "duplicate id" if key else "no message id")
        else:
            nodes[key] = place, row | {"replies": []}
    roots: list[Node] = []
    lost: list[Node] = []
    for _, node in nodes.values():
        parent = _identifier(node.get("parent_id"))
        if parent in nodes:
            nodes[parent][1]["replies"].append(node)
        else:
            (lost if parent else roots).append(node)
    for root in roots:
        yield nodes[_id(root)][0], {"message_tree_id": root.get("message_tree_id") or _id(root), "prompt": root}
    for node in _descendants(lost):
        reject(nodes[_id(node)][0], node, "parent is missing")
    for key in nodes.keys() - set(map(_id, _descendants(roots + lost))):
        reject(*nodes[key], "parents in a circle")


def _descendants(starts: Iterable[Node]) -> list[Node]:
    """These nodes and all below them."""
    nodes = list(starts)
    for node in nodes:  # the list grows while it is read
        nodes += node["replies"]
    return nodes


def unusable(node: Any, lang: str = "") -> str:
    """Why a message is left out; empty if it is used. review_result is false for spam, null if undecided."""
    if not isinstance(node, dict):
        return "message is not an object"
    if node.get("deleted") or node.get("review_result") is False:
        return "deleted or spam"
    if not isinstance(node.get("text"), str) or not node["text"].strip():
        return "empty message"
    return "other language" if lang and node.get("lang") != lang else ""


def best_path(root: Node, lang: str = "") -> list[Node]:
    """The longest path that takes the best-ranked assistant reply at each branch and ends in a reply; else empty.

    Rank 0 is best (Open-Assistant's ranked pairs); if it was filtered out, the best remaining rank is taken. Unranked
    siblings come after ranked ones, oldest first. Of paths of one length, the one with more characters is taken, then
    the one whose last reply has the smaller id.
    """
    steps = [_Step(root, START, 1, len(root["text"]))] if not unusable(root, lang) else []
    for index, step in enumerate(steps):  # the list grows while it is read
        steps += [
            _Step(reply, index, step.messages + 1, step.characters + len(reply["text"]))
            for reply in _followers(step.node, lang)
        ]
    replies = [index for index, step in enumerate(steps) if step.node.get("role") != "prompter"]
    if not replies:
        return []
    index = min(replies, key=lambda i: (-steps[i].messages, -steps[i].characters, _id(steps[i].node)))
    path = []
    while index != START:
        path.append(steps[index].node)
        index = steps[index].before
    return path[::-1]


class _Step(NamedTuple):
    """A message, and the path from the root to it."""

    node: Node
    before: int  # index of the step before, or START
    messages: int
    characters: int


START = -1


def _followers(node: Node, lang: str) -> list[Node]:
    replies = node.get("replies")
    usable = [reply for reply in replies if not unusable(reply, lang)] if isinstance(replies, list) else []
    return sorted(usable, key=_preference)[:1] if node.get("role") == "prompter" else usable


def _preference(node: Node) -> tuple[float, str, str]:
    rank = node.get("rank")
    if not isinstance(rank, int | float) or not rank >= 0:  # NaN as well, which some programs write for null
        rank = float("inf")
    return (rank, str(node.get("created_date") or ""), _id(node))


def _id(node: Node) -> str:
    return _identifier(node.get("message_id"))


def _identifier(value: Any) -> str:
    return "" if value is None else str(value)  # 0 is an identifier
