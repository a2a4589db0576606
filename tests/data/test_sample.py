"""The embedded sample of conversation trees, in OASST2's schema, holds what the reader must cope with."""

import json
from collections import Counter
from pathlib import Path

SAMPLE = Path(__file__).parents[2] / "env/data/sample_trees.jsonl"
TREES = [json.loads(line) for line in SAMPLE.read_text(encoding="utf-8").split("\n")[:-1]]


def walk(message, parent=None):
    yield message, parent
    for reply in message["replies"]:
        yield from walk(reply, message)


LINKS = [(m, parent) for tree in TREES for m, parent in walk(tree["prompt"])]
MESSAGES = [m for m, _ in LINKS]
GROUPS = [m["replies"] for m in MESSAGES if m["role"] == "prompter" and m["replies"]]
ONLY = [m for m, *others in GROUPS if not others]
RANKS = [[m.get("rank") for m in group] for group in GROUPS]
ALIVE = [[m for m in group if not m["deleted"]] for group in GROUPS]


def test_the_sample_is_large_enough_and_has_four_languages():
    count = Counter(tree["prompt"]["lang"] for tree in TREES)
    assert count.total() >= 48 and count.pop("en") >= 40
    assert set(count) == {"de", "es", "fr"} and set(count.values()) <= {2, 3}
    best = [m for m in MESSAGES if m["lang"] == "en" and not m["deleted"] and (m in ONLY or m.get("rank") == 0)]
    assert sum(len(m["text"].split()) for m in best) >= 12_000


def test_ids_links_roles_and_ranks_are_consistent():
    assert len({m["message_id"] for m in MESSAGES}) == len(MESSAGES)
    assert all(tree["message_tree_id"] == tree["prompt"]["message_id"] for tree in TREES)
    for m, parent in LINKS:
        assert m.get("parent_id") == (parent["message_id"] if parent else None)
        assert m["role"] == ("assistant" if parent and parent["role"] == "prompter" else "prompter")
        assert m["role"] == "assistant" or m.get("rank") is None
    for ranks in RANKS:
        ranked = sorted(r for r in ranks if r is not None)
        assert ranked == list(range(len(ranked)))


def test_every_variety_occurs():
    assert any(0 in r[1:] for r in RANKS), "the best reply comes first everywhere"
    assert any(a and m["deleted"] and m.get("rank") == 0 for g, a in zip(GROUPS, ALIVE, strict=True) for m in g)
    assert {m.get("rank", "absent") for m in ONLY} >= {"absent", None}
    assert {len(r) > 1 and (None in r, 0 in r) for r in RANKS} >= {(True, True), (True, False), (False, True)}
    assert any(m["role"] == "assistant" and len(m["replies"]) > 1 for m in MESSAGES), "no branching prompters"
    assert any(p and m["role"] == "prompter" and not m["replies"] for m, p in LINKS), "no trailing prompter"
    assert any(m["deleted"] and m["replies"] for m in MESSAGES) and [] in ALIVE
    assert any(not tree["prompt"]["replies"] for tree in TREES), "every prompt has a reply"
    assert any(m["synthetic"] and m["model_name"] for m in MESSAGES) and any(m.get("emojis") for m in MESSAGES)
    assert {type(m.get("labels", "absent")) for m in MESSAGES} == {dict, type(None), str}, "dict, null, absent"
    assert any(p and m["lang"] != p["lang"] for m, p in LINKS), "no other language inside a tree"
    assert {m["text"][0] for m in MESSAGES} >= {" ", "\t"}
    text = "".join(m["text"] for m in MESSAGES)
    assert all(part in text for part in ("<|im_end|>", "<|eot_id|>", "\u0301", "\u2028", "λ"))
