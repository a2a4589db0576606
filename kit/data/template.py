"""Chat template: a tokenizer's own rendering of conversations, with the exact place of each message in it.

A conversation is rendered as it is, so its text is the one of inference. The text of a plain conversation is compared
with the template's text between contents, which depends only on the roles. Where it differs, the conversation is
rendered once more with marks in its messages. The marks give the places if the text without them is still the same;
else the template has looked at the marks, and the conversation is refused.
"""

import json
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from kit.data.keys import REASONING_KEYS
from kit.data.places import (
    OTHER,
    Message,
    Messages,
    Piece,
    Placement,
    Rendered,
    Surroundings,
    mark_message,
    marked,
    without_marks,
)
from kit.data.turns import replies_by_prefix, without_reasoning
from kit.errors import KitError

Tools = Sequence[dict[str, Any]]

# Templates that ask for today's date would give other ids tomorrow. This is the date in Llama 3.1's template.
FIXED_DATE = (
    "{%- macro strftime_now(format) -%}{{ format | replace('%d', '26') | replace('%b', 'Jul') | replace('%B', 'July') "
    "| replace('%m', '07') | replace('%Y', '2024') | replace('%y', '24') | replace('%A', 'Friday') }}{%- endmacro -%}"
)
MAX_SKELETONS = 256  # role sequences whose template texts are kept
CHANGED = "changed by the chat template"
UNPLACED_CALLS = "tool calls whose place in the chat template's text is not certain"
UNPLACED_REASONING = "reasoning whose place in the chat template's text is not certain"
TOOL_CALLS = "tool calls"

PROBE: list[Message] = [{"role": "user", "content": "\n x \n"}, {"role": "assistant", "content": "y"}]
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_function",
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {"probe_argument": {"type": "string", "description": "An argument."}},
            "required": ["probe_argument"],
        },
    },
}


class ChatTemplate:
    """A tokenizer's chat template. `control` matches all of its added tokens, `special` those that content cannot be.

    Raises KitError where the tokenizer has no template.
    """

    def __init__(self, tokenizer: Any, control: re.Pattern[str], special: re.Pattern[str]) -> None:
        if not tokenizer.chat_template:
            raise KitError(
                f"The tokenizer {tokenizer.name_or_path} has no chat template; choose an instruct model, or put a "
                "chat_template.jinja into the tokenizer's folder."
            )
        self.tokenizer, self.control, self.special = tokenizer, control, special
        self._skeletons: dict[tuple[str, ...], list[str] | None] = {}
        self.end_token, self.takes_parts = "", False
        found = self._locate_probe()
        if not found.pieces:  # templates of multimodal models may want contents as lists of parts
            self.takes_parts = True
            found = self._locate_probe()
            self.takes_parts = bool(found.pieces)
        text = "".join(piece.text for piece in found.pieces)
        self.strips_content = bool(text) and "\n x \n" not in text  # as Llama 3's template does
        behind = control.search(found.pieces[-1].text) if found.pieces else None
        self.end_token = behind.group() if behind else ""

    def _locate_probe(self) -> Rendered:
        self._skeletons.clear()
        text = self._try_render(PROBE)
        return self._locate(PROBE, PROBE, text, ()) if isinstance(text, str) else Rendered()

    def __call__(self, chats: Sequence[Messages], tools: Sequence[Tools]) -> list[Rendered]:
        """One Rendered per conversation."""
        shown = [self._shown(messages) for messages in chats]
        given = [each if each and self.takes_tools else () for each in tools]
        texts = self._render_each(shown, given)
        found = [self._place(*each) for each in zip(chats, shown, texts, given, strict=True)]
        return [
            rendered if not each or self.takes_tools else rendered._replace(unused=(*rendered.unused, "tools"))
            for rendered, each in zip(found, tools, strict=True)
        ]

    def source(self, tools: Tools = ()) -> str:
        """The template's text; some tokenizers have another one for conversations with tools."""
        template = str(self.tokenizer.get_chat_template(tools=list(tools) or None))
        return FIXED_DATE + template if "strftime_now" in template else template

    @cached_property
    def _plain_source(self) -> str:
        return self.source()

    def render(self, messages: Messages, tools: Tools = (), **options: Any) -> Any:
        """apply_chat_template, as text unless the options say otherwise, with a fixed date."""
        return self._apply([list(messages)], tools, **options)[0]

    def own_ids(self, messages: Messages, tools: Tools = ()) -> list[int]:
        """The ids of apply_chat_template."""
        given = tools if self.takes_tools else ()
        encoded = self._apply([list(self._shown(messages))], given, tokenize=True, return_dict=True)
        return list(encoded["input_ids"][0])

    def _apply(self, chats: list[list[Message]], tools: Tools, **options: Any) -> Any:
        template = self.source(tools) if tools else self._plain_source
        if self.takes_parts:
            chats = [[m | {"content": [{"type": "text", "text": m["content"]}]} for m in chat] for chat in chats]
        options = {"tokenize": False, "chat_template": template} | options
        return self.tokenizer.apply_chat_template(chats, tools=list(tools) or None, **options)

    def _render_each(self, chats: Sequence[Messages], tools: Sequence[Tools]) -> list[str | Exception]:
        """The text of each conversation, or the error that the template raised."""
        plain = [index for index, given in enumerate(tools) if not given]
        texts: dict[int, str | Exception] = {}
        if plain:
            try:
                rendered = self._apply([list(chats[index]) for index in plain], ())
            except _template_errors():
                rendered = [self._try_render(chats[index]) for index in plain]
            texts = dict(zip(plain, rendered, strict=True))
        return [texts[i] if i in texts else self._try_render(chats[i], tools[i]) for i in range(len(chats))]

    def _try_render(self, messages: Messages, tools: Tools = (), **options: Any) -> str | Exception:
        try:
            return str(self.render(messages, tools, **options))
        except _template_errors() as error:
            return error

    def _place(self, messages: Messages, shown: Messages, text: str | Exception, tools: Tools) -> Rendered:
        has_keys = any(len(message) > 2 for message in messages)  # besides role and content, as few have
        if has_keys and any("tool_calls" in message for message in shown) and not self.takes_calls:
            return Rendered(refused=TOOL_CALLS)
        if isinstance(text, Exception):
            return Rendered(refused=f"refused by the chat template: {text}")
        has_extras = bool(tools) or (has_keys and any(len(message) > 2 for message in shown))
        rendered = None if has_extras else self._plain_pieces(messages, text)
        rendered = rendered or self._locate(messages, shown, text, tools)
        if not has_keys:
            return rendered
        reasoning = {key for message in messages for key in message.keys() & set(REASONING_KEYS)}
        if reasoning and not self.reasoning_key:
            unused = tuple(f"message.{key}" for key in sorted(reasoning))
            rendered = rendered._replace(unused=(*rendered.unused, *unused))
        return rendered

    def _plain_pieces(self, messages: Messages, text: str) -> Rendered | None:
        """The pieces where the text is what the template writes around neutral contents of the same roles."""
        around = self._skeleton(tuple(message["role"] for message in messages))
        if around is None:
            return None
        contents = [message["content"] for message in messages]
        if self.strips_content:
            contents = [content.strip() for content in contents]
        pieces = [""] * (2 * len(messages) + 1)
        pieces[::2], pieces[1::2] = around, contents
        if "".join(pieces) != text:
            return None
        made = [Piece(piece) for piece in pieces]
        for index, message in enumerate(messages):
            left_out = not message.get("train", True)
            in_loss = message["role"] == "assistant" and not left_out
            made[2 * index + 1] = Piece(contents[index], True, in_loss, left_out=left_out)
        return Rendered(made)

    def _skeleton(self, roles: tuple[str, ...]) -> list[str] | None:
        """The template's text around the messages of these roles; None where it changes, moves or refuses them."""
        if roles not in self._skeletons:
            if len(self._skeletons) >= MAX_SKELETONS:
                self._skeletons.clear()
            names = [f"x{index}" for index in range(len(roles))]
            neutral = [{"role": role, "content": marked(name, OTHER)} for role, name in zip(roles, names, strict=True)]
            text = self._try_render(neutral)
            pieces = re.split(f"[{OTHER}]", text) if isinstance(text, str) else []
            self._skeletons[roles] = pieces[::2] if pieces[1::2] == names else None
        return self._skeletons[roles]

    def _shown(self, messages: Messages) -> Messages:
        """The messages as the template takes them."""
        if all(len(message) == 2 for message in messages):
            return messages
        return [self._shown_message(message) for message in messages]

    def _shown_message(self, message: Message) -> Message:
        shown = {key: value for key, value in message.items() if key not in ("train", *REASONING_KEYS)}
        reasoning = next((message[key] for key in REASONING_KEYS if key in message), "")
        if reasoning and self.reasoning_key:
            shown[self.reasoning_key] = reasoning
        if "tool_calls" in shown:
            shown["tool_calls"] = [self._shown_call(call) for call in shown["tool_calls"]]
        return shown

    def _shown_call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call.get("function", call)
        if self.takes_calls == "text" and not isinstance(function["arguments"], str):
            function = function | {"arguments": json.dumps(function["arguments"], ensure_ascii=False)}
        return call | {"function": function} if "function" in call else function

    @cached_property
    def takes_tools(self) -> bool:
        """Whether descriptions of tools change the text."""
        text = self._try_render(PROBE, [PROBE_TOOL])
        return isinstance(text, str) and PROBE_TOOL["function"]["name"] in text  # type: ignore[index]

    @cached_property
    def takes_calls(self) -> str:
        """How the template takes the arguments of tool calls: "object", "text", or empty if it takes no calls."""
        for kind, arguments in (("object", {"probe_argument": "z"}), ("text", '{"probe_argument": "z"}')):
            function = {"name": "probe_function", "arguments": arguments}
            call = {"id": "abcdefghi", "type": "function", "function": function}
            probe = [PROBE[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
            for tools in ((), (PROBE_TOOL,)):
                text = self._try_render(probe, tools)
                plain = self._try_render(probe[:1], tools)
                if isinstance(text, str) and text.count("probe_function") > str(plain).count("probe_function"):
                    return kind
        return ""

    @cached_property
    def reasoning_key(self) -> str:
        """The key under which the template takes a reply's reasoning; empty if it takes none."""
        for key in REASONING_KEYS:
            text = self._try_render([PROBE[0], PROBE[1] | {key: "probe_reasoning"}])
            if isinstance(text, str) and "probe_reasoning" in text:
                return key
        return ""

    @cached_property
    def _generation_prompt(self) -> str:
        """What the template writes in front of a reply that is to come."""
        prompt = self._try_render(PROBE[:1])
        asked = self._try_render(PROBE[:1], add_generation_prompt=True)
        is_longer = isinstance(asked, str) and isinstance(prompt, str) and asked.startswith(prompt)
        return str(asked)[len(str(prompt)) :] if is_longer else ""

    def _locate(self, messages: Messages, shown: Messages, text: str, tools: Tools) -> Rendered:
        """The pieces by marks around complete contents, else around their words, which templates strip less often."""
        extras = [tools, *(message.get("tool_calls", ()) for message in messages)]
        if any(extras) and self.special.search(json.dumps(extras, ensure_ascii=False)):
            return Rendered(refused="control token in a tool call")
        surroundings = Surroundings(
            self._skeleton(tuple(message["role"] for message in messages)),
            self._generation_prompt,
            self.end_token,
            self.control,
            self.special,
        )
        for words_only in (False, True):
            marked_text = self._try_render([mark_message(message, words_only) for message in shown], tools)
            if isinstance(marked_text, str) and without_marks(marked_text) == text:
                found = Placement(messages, shown, marked_text, surroundings).pieces()
                if found:
                    return found
        if not any(len(message) > 2 for message in shown):
            return Rendered(refused=CHANGED)
        for known in (shown, without_reasoning(shown)):
            found = replies_by_prefix(
                lambda part, asked: self._text_or_nothing(part, tools, asked),
                messages,
                known,
                text,
                self.control,
                self.special,
            )
            if found:
                return found
        has_calls = any("tool_calls" in message for message in shown)
        return Rendered(refused=UNPLACED_CALLS if has_calls else UNPLACED_REASONING)

    def _text_or_nothing(self, messages: Messages, tools: Tools, add_generation_prompt: bool) -> str:
        text = self._try_render(messages, tools, add_generation_prompt=add_generation_prompt)
        return text if isinstance(text, str) else ""


def _template_errors() -> tuple[type[Exception], ...]:
    """What templates raise on purpose, and what their expressions raise on values that they do not expect."""
    from jinja2 import TemplateError

    return (TemplateError, TypeError, ValueError, KeyError, AttributeError)
