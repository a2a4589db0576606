"""Ledger: where every token and every row of the source went, to the exact token."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kit.data.conversations import Conversation
from kit.data.encode import Encoded
from kit.errors import KitError

OPEN_END = "The chat template writes no token behind a reply: the model will not learn to stop."
EXAMPLES = 5  # row ids kept for each reason


@dataclass
class Ledger:
    """Counts of tokens and rows. When it is closed, read_tokens == kept_tokens + sum(dropped.values()).

    `kept_tokens` is counted from the documents that are written, everything else while rows are read, so the equation
    finds tokens that are lost or written twice. Documents that `overlong = "split"` makes repeat the head of their
    conversation; these tokens are part of read_tokens, and repeated_tokens says how many they are.
    """

    read_tokens: int = 0
    kept_tokens: int = 0
    repeated_tokens: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # tokens by reason
    dropped_rows: Counter[str] = field(default_factory=Counter)
    changed_rows: Counter[str] = field(default_factory=Counter)
    unused_keys: Counter[str] = field(default_factory=Counter)  # rows that have them
    warnings: Counter[str] = field(default_factory=Counter)  # rows by sentence
    examples: dict[str, list[str]] = field(default_factory=dict)  # ids of dropped rows by reason

    def drop(self, row: str, reason: str, tokens: int = 0) -> None:
        """Count a row, or a document of it, that is not trained on."""
        self.dropped[reason] += tokens
        self.dropped_rows[reason] += 1
        self._keep_examples(reason, [row])

    def cut(self, tokens: int) -> None:
        """Count a document that lost its last tokens."""
        self.dropped["cut at seq_len"] += tokens
        self.changed_rows["cut at seq_len"] += 1

    def note(self, conversation: Conversation, encoded: Encoded) -> None:
        """Count what of a row is not trained on, or not as the row has it."""
        self.unused_keys.update(conversation.unused)
        if encoded.refused:
            return
        self.unused_keys.update(encoded.unused)
        self.changed_rows["rewritten by the chat template"] += encoded.rewritten
        self.changed_rows["reply of weight 0"] += not all(m.get("train", True) for m in conversation.messages)
        self.warnings[OPEN_END] += encoded.open_end

    def split(self, repeated_tokens: int) -> None:
        """Count a conversation that became several documents."""
        self.changed_rows["split"] += 1
        self.repeated_tokens += repeated_tokens

    def add(self, part: dict[str, Any]) -> None:
        """Add a part's ledger, as `as_json` returned it. The order of parts does not change the result."""
        self.read_tokens += part["ledger"]["read_tokens"]
        self.repeated_tokens += part["ledger"]["repeated_tokens"]
        self.dropped.update(part["ledger"]["dropped"])
        self.dropped_rows.update(part["dropped_rows"])
        self.changed_rows.update(part["changed_rows"])
        self.unused_keys.update(part["unused_keys"])
        self.warnings.update(part["warnings"])
        for reason, rows in part["dropped_examples"].items():
            self._keep_examples(reason, rows)

    def close(self, kept_tokens: int) -> None:
        """Set the tokens that are written. Raises KitError if any token is unaccounted for."""
        self.kept_tokens = kept_tokens
        if self.read_tokens != self.kept_tokens + sum(self.dropped.values()):
            raise KitError(f"The token ledger does not add up: {self}. This is a fault in the kit; please report it.")

    def as_json(self) -> dict[str, Any]:
        """The keys of the manifest that say where tokens and rows went."""
        return {
            "ledger": {
                "read_tokens": self.read_tokens,
                "kept_tokens": self.kept_tokens,
                "repeated_tokens": self.repeated_tokens,
                "dropped": _positive(self.dropped),
            },
            "dropped_rows": dict(sorted(self.dropped_rows.items())),
            "dropped_examples": dict(sorted(self.examples.items())),
            "changed_rows": _positive(self.changed_rows),
            "unused_keys": _positive(self.unused_keys),
            "warnings": _positive(self.warnings),
        }

    def _keep_examples(self, reason: str, rows: Iterable[str]) -> None:
        """Keep the shortest, then alphabetically first ids, whatever the order in which they come."""
        known = {*self.examples.get(reason, []), *rows}
        self.examples[reason] = sorted(known, key=lambda row: (len(row), row))[:EXAMPLES]


def _positive(counts: dict[str, int]) -> dict[str, int]:
    return {reason: count for reason, count in sorted(counts.items()) if count > 0}
