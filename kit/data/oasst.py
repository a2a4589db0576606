"""OASST trees: flat messages joined into them, and the best path through one."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

Node = dict[str, Any]
Place = tuple[int, int]


def join(rows: Iterable[tuple[Place, Any]], reject: Callable[[Place, Any, str], None]) -> Iterator[tuple[Place, Node]]:
    """Flat messages into nested trees, each at the place of its root and in the order of the roots.

    A message whose id came before, whose parent is missing, or whose parents go round in a circle is rejected.
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
        parent = str(node.get("parent_id") or "")
        (nodes[parent][1]["replies"] if parent in nodes else lost if parent else roots).append(node)
    for root in roots:
        yield nodes[_id(root)][0], {"message_tree_id": root.get("message_tree_id") or _id(root), "prompt": root}
    for node in _all(lost):
        reject(nodes[_id(node)][0], node, "parent is missing")
    for key in nodes.keys() - set(map(_id, _all(roots + lost))):
        reject(*nodes[key], "parents in a circle")


def _all(starts: Iterable[Node]) -> list[Node]:
    nodes = list(starts)
    for node in nodes:  # grows while it runs
        nodes += node["replies"]
    return nodes


def unusable(node: Any, lang: str = "") -> str:
    """Why a message is filtered out; empty where it survives. review_result is false for spam, null if undecided."""
    if not isinstance(node, dict):
        return "message is not an object"
    if node.get("deleted") or node.get("review_result") is False:
        return "deleted or spam"
    if not isinstance(node.get("text"), str) or not node["text"].strip():
        return "empty message"
    return "other language" if lang and node.get("lang") != lang else ""


def best_path(root: Node, lang: str = "") -> list[Node]:
    """The longest path that takes the best-ranked assistant reply at each branch and ends in a reply; else empty.

    rank 0 is best (Open-Assistant's ranked pairs); where filtering removed it, the best that is left counts. Unranked
    siblings come after ranked ones, oldest first. Ties between paths go to more characters, then to the smaller id.
    """
    nodes = [(root, -1)] if not unusable(root, lang) else []
    for index, (node, _) in enumerate(nodes):  # grows while it runs: every node after its parent
        nodes += [(reply, index) for reply in _next(node, lang)]
    # Of each node's best path to a reply: (-messages, -characters, id of the last reply, where it goes on).
    tails: list[tuple[int, int, str, int] | None] = [None] * len(nodes)
    for index in range(len(nodes) - 1, -1, -1):
        node, parent = nodes[index]
        tail = tails[index] or ((0, 0, _id(node), -1) if node.get("role") != "prompter" else None)
        if tail:
            tails[index] = tail
            longer = (tail[0] - 1, tail[1] - len(node["text"]), tail[2], index)
            if index:
                tails[parent] = min(tails[parent] or longer, longer)
    path, at = [], 0
    while nodes and at >= 0 and (tail := tails[at]):
        path.append(nodes[at][0])
        at = tail[3]
    return path


def _next(node: Node, lang: str) -> list[Node]:
    replies = node.get("replies")
    alive = [r for r in replies if not unusable(r, lang)] if isinstance(replies, list) else []
    return sorted(alive, key=_preference)[:1] if node.get("role") == "prompter" else alive


def _preference(node: Node) -> tuple[float, str, str]:
    rank = node.get("rank")
    if not isinstance(rank, int | float) or not rank >= 0:  # NaN too, which some writers put for null
        rank = float("inf")
    return (rank, str(node.get("created_date") or ""), _id(node))


def _id(node: Node) -> str:
    return str(node.get("message_id") or "")
