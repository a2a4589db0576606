"""Preview: one packed row as text, with what the loss counts marked and a line between documents."""

import html
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from kit.data.encode import IGNORE
from kit.show import Part, Result, count

IN_LOSS_STYLE = "background:rgba(0, 114, 178, 0.25)"  # on a light and on a dark page
DOCUMENT_LINE = '<hr style="border:0;border-top:2px dashed #64748b">'
REPLACEMENT = "\ufffd"  # what decoders put for bytes that are not a complete character


@dataclass(frozen=True)
class Span:
    """Tokens of one document that follow each other and are all in the loss, or all not."""

    text: str
    tokens: int
    in_loss: bool
    document: int  # in the row, from 0


@dataclass(frozen=True)
class Preview(Result):
    """One row of a split, as `spans` of its first `shown` tokens. In plain text \u27e6 \u27e7 enclose the loss."""

    split: str
    row: int
    rows: int  # of the split
    documents: int
    tokens: int
    loss_tokens: int
    shown: int
    spans: tuple[Span, ...]

    @classmethod
    def read(cls, rows_file: Path, tokenizer_folder: Path, row: int, limit: int) -> "Preview":
        """Row number `row` of an Arrow file of packed rows, with at most `limit` tokens as text."""
        import pyarrow as pa
        from tokenizers import Tokenizer

        with pa.memory_map(str(rows_file)) as mapped, pa.ipc.open_stream(mapped) as stream:
            table = stream.read_all()
            values = table.slice(row, 1).to_pylist()[0]
        ids, lengths = values["input_ids"], values["seq_lengths"]
        in_loss = [label != IGNORE for label in values["labels"]]
        tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
        spans = tuple(_spans(tokenizer, ids, in_loss, lengths, limit))
        shown = sum(span.tokens for span in spans)
        return cls(rows_file.parent.name, row, table.num_rows, len(lengths), len(ids), sum(in_loss), shown, spans)

    def parts(self) -> Iterator[Part]:
        """A headline, then the text."""
        yield self._headline()
        documents = groupby(self.spans, key=lambda span: span.document)
        yield f"\n{'-' * 40}\n".join("".join(map(_marked, spans)) for _, spans in documents)

    def _headline(self) -> str:
        cut = f"; the first {self.shown:,} tokens are shown" if self.shown < self.tokens else ""
        return (
            f"{self.split} row {self.row} of 0 to {self.rows - 1}: {count(self.documents, 'document')}, "
            f"{self.tokens:,} tokens, {self.loss_tokens:,} in the loss (marked){cut}"
        )

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        documents = groupby(self.spans, key=lambda span: span.document)
        body = DOCUMENT_LINE.join("".join(map(_html_span, spans)) for _, spans in documents)
        style = "white-space:pre-wrap;word-break:normal;font-size:12px"
        row = f'<pre style="{style}">{body}</pre>'  # MathJax reads $ in a <div> as math
        return {"text/html": f"<div>{html.escape(self._headline())}</div>{row}", "text/plain": str(self)}


def _marked(span: Span) -> str:
    return f"\u27e6{span.text}\u27e7" if span.in_loss else span.text


def _html_span(span: Span) -> str:
    style = f' style="{IN_LOSS_STYLE}"' if span.in_loss else ""
    return f"<span{style}>{html.escape(span.text)}</span>"


def _spans(tokenizer: Any, ids: list[int], in_loss: list[bool], lengths: list[int], limit: int) -> Iterator[Span]:
    """Spans are decoded together with what is before them in their document: a character may be several tokens, and
    some decoders treat the first token of a text in another way."""
    start = 0
    for document, length in enumerate(lengths):
        end = min(start + length, limit)
        if start >= end:
            return
        decoded = ""
        position = start
        for flag, group in groupby(in_loss[start:end]):
            stop = position + len(list(group))
            if stop == limit < start + length:
                stop = _complete_character(tokenizer, ids, start, stop)
            text = tokenizer.decode(ids[start:stop], skip_special_tokens=False)
            if stop > position:
                yield Span(text[len(decoded) :], stop - position, flag, document)
            decoded, position = text, stop
        start += length


def _complete_character(tokenizer: Any, ids: list[int], start: int, stop: int) -> int:
    """The end before `stop` at which the text does not break off inside a character (4 bytes at most)."""
    for end in range(stop, max(start, stop - 4), -1):
        if not tokenizer.decode(ids[start:end], skip_special_tokens=False).endswith(REPLACEMENT):
            return end
    return stop
