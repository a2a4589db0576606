import re
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
import trl
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kit.config.models import load_tokenizer
from kit.data.encode import Encoder, agrees_with_template
from kit.data.sources import open_source
from kit.errors import InputError, KitError
from tests.llama31 import llama31  # noqa: F401 - a fixture

EOT = 128009
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs", "Co"], exclude_characters="\ufdd0\ufdd1"), min_size=1)
CONTENTS = st.lists(ANY_TEXT.filter(str.strip), min_size=2, max_size=4)
MARKS = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + CONTENT + '<|im_end|>' }}{% endfor %}"


@pytest.fixture(scope="module")
def smol(smollm2):
    return Encoder(load_tokenizer(str(smollm2)))


@pytest.fixture(scope="module")
def llama(llama31):  # noqa: F811
    return Encoder(load_tokenizer(str(llama31)))


@pytest.fixture(scope="module")
def fast(llama31):  # noqa: F811
    pytest.importorskip("gigatoken", reason="the optional engine gigatoken is not installed")
    return Encoder(load_tokenizer(str(llama31)), engine="gigatoken")


def chat(*contents):
    return [{"role": "assistant" if i % 2 else "user", "content": c} for i, c in enumerate(contents)]


def counted(encoder, messages):
    encoded = encoder([messages])[0]
    return encoder.tokenizer.decode(encoded.ids[encoded.in_loss])


def oracle(messages):
    """What Llama 3.1's template makes of replies, written from its text: stripped content and the end token."""
    return "".join(m["content"].strip() + "<|eot_id|>" for m in messages if m["role"] == "assistant")


def with_template(smollm2, template):
    tokenizer = load_tokenizer(str(smollm2))
    tokenizer.chat_template = template
    return tokenizer


def test_the_loss_counts_replies_and_their_end_tokens_only(smol):
    # Three replies: only the last was trained in axolotl#1761. Pad equals EOS here: huggingface/trl#1623.
    assert smol.tokenizer.pad_token_id == smol.tokenizer.eos_token_id
    messages = chat("Hi", "Hello.", "And?", "Yes.", "So?", "Bye.")
    assert counted(smol, messages) == "Hello.<|im_end|>Yes.<|im_end|>Bye.<|im_end|>"


def test_labels_never_count_the_first_token(smol):
    everything = Encoder(smol.tokenizer, loss="all")([chat("Hi", "Hello.")])[0]
    assert everything.labels.tolist() == [-100, *everything.ids[1:].tolist()]


@given(CONTENTS)
@example(["\x04 x", "\x04"])  # bytes that SmolLM2's vocabulary has no token for
@example([" \n x", "\n\n y \n"])
@settings(deadline=None)
def test_ids_equal_smollm2s_own_rendering(smol, contents):
    messages = chat(*contents)
    assert agrees_with_template(smol, messages, smol([messages])[0])


@given(CONTENTS, st.booleans())
@example(["e\u0301 \u00e9", "\u1100\u1161"], False)
@settings(deadline=None)
def test_ids_and_mask_equal_llama_31s_own_rendering(llama, contents, system):
    messages = [{"role": "system", "content": "Be brief."}] * system + chat(*contents)
    assert agrees_with_template(llama, messages, llama([messages])[0])
    if not any("<|" in content for content in contents):
        assert counted(llama, messages) == oracle(messages)


def test_real_conversations_have_llama_31s_ids_and_an_exact_mask(llama, real_trees):
    # The stock template has no {% generation %}: TRL 1.16 raises, others mask nothing or all (marin#7237).
    found = [c.messages for _, c in open_source(str(real_trees)).read("en", lambda row, reason: None)]
    encoded = llama(found)
    assert len(found) == 100
    assert all(agrees_with_template(llama, m, e) for m, e in zip(found, encoded, strict=True))
    assert [counted(llama, m) for m in found] == [oracle(m) for m in found]
    assert round(np.mean([len(e.ids) for e in encoded]), 1) == 448.4  # the mean behind 5,125 conversations, 36 steps


def test_bos_occurs_once_and_ids_are_as_published(llama):
    # OpenRLHF#393 printed the ids of "test" with the system block removed from the template, where BOS was doubled.
    tokenizer = load_tokenizer(llama.tokenizer.name_or_path)
    block = re.compile(r'\{\{- "<\|start_header_id\|>system<\|end_header_id\|>.*?"<\|eot_id\|>" \}\}', re.DOTALL)
    tokenizer.chat_template = block.sub("", tokenizer.chat_template)
    asked = [128000, 128006, 882, 128007, 271, 1985, EOT, 128006, 78191, 128007, 271]
    encoded = Encoder(tokenizer)([chat("test", "ok")])[0]
    assert encoded.ids.tolist()[:11] == asked
    assert encoded.ids.tolist().count(128000) == 1
    assert encoded.ids[-1] == EOT  # no header of a next reply follows (transformers#32252)


def test_template_tokens_are_counted(llama):
    # 25 tokens: BOS, the system header and the dates; 5 for each header and end token of two messages.
    assert llama([chat("Hi", "Hello.")])[0].template_tokens == 25 + 2 * 5 + 1


def test_templates_with_todays_date_have_a_fixed_date(smollm2):
    template = "{{ 'Today: ' + strftime_now('%d %b %Y') }}" + MARKS.replace("CONTENT", "m.content")
    encoder = Encoder(with_template(smollm2, template))
    text = encoder.tokenizer.decode(encoder([chat("Hi", "Hello.")])[0].ids)
    assert text.startswith("Today: 26 Jul 2024") and f"{datetime.now():%Y}" != "2024"


@pytest.mark.parametrize("name", ["smol", "llama"])
def test_control_tokens_inside_content_stay_text(request, name):
    # transformers#29279: they became real ones.
    encoder = request.getfixturevalue(name)
    end = {"smol": "<|im_end|>", "llama": "<|eot_id|>"}[name]
    encoded = encoder([chat(f"What does {end}<|im_start|>system do?", f"It ends a turn: {end}.")])[0]
    ends = encoder.tokenizer.convert_tokens_to_ids(end)
    assert encoded.ids.tolist().count(ends) == 3  # the default system message, the prompt, the reply
    assert f"It ends a turn: {end}." in encoder.tokenizer.decode(encoded.ids[encoded.in_loss])


def test_plain_text_is_in_the_loss_between_bos_and_eos(smol, llama):
    document = [{"role": "text", "content": " Line <|eot_id|>\n"}]
    assert llama.tokenizer.decode(llama([document])[0].ids) == "<|begin_of_text|> Line <|eot_id|>\n<|eot_id|>"
    assert llama([document])[0].ids.tolist().count(EOT) == 1  # the one in the text is text
    assert counted(smol, document) == " Line <|eot_id|>\n<|im_end|>"


def test_plain_text_needs_no_chat_template(smollm2):
    encoder = Encoder(with_template(smollm2, None))
    assert counted(encoder, [{"role": "text", "content": "x"}]) == "x<|im_end|>"
    with pytest.raises(KitError, match=r"no chat template.*chat_template.jinja"):
        encoder([chat("a", "b")])


def test_templates_that_strip_contents_are_supported(smollm2):
    encoder = Encoder(with_template(smollm2, MARKS.replace("CONTENT", "(m.content | trim)")))
    messages = chat("  Hi\n", "\tHello. ")
    assert agrees_with_template(encoder, messages, encoder([messages])[0])
    assert counted(encoder, messages) == "Hello.<|im_end|>"


def test_conversations_whose_replies_the_template_changes_are_refused_one_by_one(smollm2):
    encoder = Encoder(with_template(smollm2, MARKS.replace("CONTENT", "(m.content | upper)")))
    found = encoder([chat("a", "b"), chat("a", "B")])
    assert [encoded.refused for encoded in found] == ["changed by the chat template", ""]
    assert found[1].rewritten  # of the prompt


def test_conversations_changed_or_refused_by_the_template_are_marked(smollm2):
    loud = "(m.content if 'shout' not in m.content else m.content | upper)"
    refuse = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    encoder = Encoder(with_template(smollm2, refuse + MARKS.replace("CONTENT", loud)))
    system = [{"role": "system", "content": "s"}, *chat("a", "b")]
    told = [encoded.refused for encoded in encoder([chat("a", "b"), chat("a", "shout"), system])]
    assert told == ["", "changed by the chat template", "refused by the chat template: no system role"]


TRL_TEMPLATES = Path(trl.__file__).parent / "chat_templates"
CONTROL = re.compile(r"<\|[\w\u2581\uff5c ]+\|>|<\uff5c[^\uff5c]+\uff5c>|<(?:start|end)_of_turn>|<turn\|>|<\|turn>")
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Weather.", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"name": "weather", "arguments": {"town": "Oslo"}}
CALLS = [
    {"role": "user", "content": "Weather in Oslo?"},
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]},
    {"role": "tool", "name": "weather", "content": "Rain, 9 degrees"},
    {"role": "assistant", "content": "It rains."},
]


def with_trl_template(smollm2, name, **flags):
    """TRL's copy of a published template, its control tokens added to SmolLM2's vocabulary."""
    template = (TRL_TEMPLATES / f"{name}.jinja").read_text()
    tokenizer = with_template(smollm2, template)
    control = sorted(set(CONTROL.findall(template)))
    special = [AddedToken(text, special=True, normalized=False, **flags) for text in control]
    plain = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special, "bos_token": "<s>", "eos_token": "</s>"})
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain])
    return Encoder(tokenizer)


PUBLISHED = sorted(path.stem for path in TRL_TEMPLATES.glob("*.jinja") if not path.stem.endswith("_training"))


@pytest.mark.parametrize("name", PUBLISHED)
def test_ids_are_the_templates_own_or_the_row_is_refused_for_every_published_template(smollm2, name):
    encoder = with_trl_template(smollm2, name)
    thinking = chat("Hi", "<think>\nwell\n</think>\n\nHello.", "And?", "<think>\nhmm\n</think>\n\nBye.")
    system = [{"role": "system", "content": " Be brief. "}, *chat("Hi ", "\n\nHello. ", "\n And?", "  Bye.\n")]
    reasons = [m | {"reasoning_content": "well"} if m["role"] == "assistant" else m for m in chat("Hi", "Hello.")]
    chats = [chat("Hi", "Hello.", "And?", "Bye."), thinking, system, reasons, CALLS, CALLS]
    tools: list = [()] * 5 + [(TOOL,)]
    own_ids = encoder.template.own_ids
    for messages, offered, encoded in zip(chats, tools, encoder(chats, tools), strict=True):
        if not encoded.refused:
            assert own_ids(messages, offered) == encoded.ids.tolist(), messages
            reply = encoder.tokenizer.decode(encoded.ids[encoded.in_loss])
            assert "Hi" not in reply and "And?" not in reply and "Rain" not in reply
            assert messages[-1]["content"].strip().removeprefix("<think>\nhmm\n</think>\n\n") in reply
    assert not encoder(chats[:1])[0].refused


def test_reasoning_is_in_the_loss_where_the_template_keeps_it(smollm2):
    encoder = with_trl_template(smollm2, "qwen3")
    first, last = "<think>\nadd\n</think>\n\nIt is 2.", "<think>\nmore\n</think>\n\n3."
    assert counted(encoder, chat("1+1?", first)) == first + "<|im_end|>"
    assert counted(encoder, chat("1+1?", first, "1+2?", last)) == "It is 2.<|im_end|>" + last + "<|im_end|>"
    thought = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "It is 2.", "thinking": "add"}]
    assert counted(encoder, thought) == first + "<|im_end|>"
    assert encoder([chat("1+1?", first, "1+2?", last)])[0].rewritten
    unread = with_trl_template(smollm2, "qwen2_5")([thought])[0]
    assert unread.unused == ("message.thinking",) and not unread.refused


def test_white_space_that_a_template_takes_off_is_not_in_the_loss(smollm2):
    encoder = with_trl_template(smollm2, "qwen3")  # strips only the front of the last reply
    assert counted(encoder, chat("Hi", "\n\nIt is 2.")) == "It is 2.<|im_end|>"
    left = Encoder(with_template(smollm2, MARKS.replace("CONTENT", "m.content.lstrip()")))
    assert counted(left, chat(" Hi ", " It is 2. ")) == "It is 2. <|im_end|>"
    replies = Encoder(
        with_template(smollm2, MARKS.replace("CONTENT", "(m.content.rstrip() if m.role == 'assistant' else m.content)"))
    )
    for messages in (chat(" Hi\n\n", " It is 2. \n"), chat("Hi", "\n2", "\n\nAnd\n", "3\n\n")):
        assert agrees_with_template(replies, messages, replies([messages])[0])
    assert counted(replies, chat(" Hi\n\n", " It is 2. \n")) == " It is 2.<|im_end|>"


LATE_SYSTEM = (
    "{% set sys = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% set last = messages | selectattr('role', 'equalto', 'user') | list | last %}{% for m in messages %}"
    "{% if m.role == 'user' %}{{ '<|im_start|>' + (sys + '\n\n' if sys and m is sameas last else '') + m.content }}"
    "{% elif m.role == 'assistant' %}{{ '<|endoftext|>' + m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
)


def test_a_system_text_in_the_last_turn_keeps_the_row(smollm2):
    encoder = Encoder(with_template(smollm2, LATE_SYSTEM))
    messages = [{"role": "system", "content": "Be brief."}, *chat("One.", "1", "And?", "1")]
    (encoded,) = encoder([messages])
    assert agrees_with_template(encoder, messages, encoded) and encoded.rewritten
    assert counted(encoder, messages) == "1<|im_end|>1<|im_end|>"


def test_a_moved_or_lost_text_never_becomes_a_control_token(smollm2):
    encoder = Encoder(with_template(smollm2, LATE_SYSTEM))
    messages = [{"role": "system", "content": "Say <|im_end|>"}, *chat("Hi", "1", "And?", "2")]
    ends = encoder.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert encoder([messages])[0].ids.tolist().count(ends) == 2
    cut = Encoder(with_template(smollm2, MARKS.replace("CONTENT", "m.content[:12]")))
    assert cut([chat("Say <|im_end|> twice", "1")])[0].refused == "changed by the chat template"


def test_a_reply_of_weight_0_is_not_in_the_loss(smol):
    messages = chat("Hi", "Wrong.", "Hi", "Right.")
    messages[1]["train"] = False
    assert counted(smol, messages) == "Right.<|im_end|>"
    everything = Encoder(smol.tokenizer, loss="all")
    assert "Wrong." not in counted(everything, messages) and "Hi" in counted(everything, messages)


def test_a_template_without_a_token_behind_the_reply_is_marked(smollm2):
    endless = Encoder(with_template(smollm2, "{% for m in messages %}{{ '<|im_start|>' + m.content }}{% endfor %}"))
    assert [encoded.open_end for encoded in endless([chat("a", "b"), chat("a", "b", "c", "d")])] == [True, True]
    assert not with_trl_template(smollm2, "phi3")([chat("a", "b")])[0].open_end


def test_tool_calls_are_in_the_loss_and_tools_are_not(smollm2):
    encoder = with_trl_template(smollm2, "qwen3")
    encoded = encoder([CALLS], [(TOOL,)])[0]
    text = encoder.tokenizer.decode(encoded.ids)
    reply = encoder.tokenizer.decode(encoded.ids[encoded.in_loss])
    assert '"description": "Weather."' in text
    call = '<tool_call>\n{"name": "weather", "arguments": {"town": "Oslo"}}\n</tool_call><|im_end|>'
    assert reply == call + "It rains.<|im_end|>"
    assert encoder.template.own_ids(CALLS, (TOOL,)) == encoded.ids.tolist()


def test_tool_calls_that_the_template_does_not_take_are_refused(smol):
    assert smol([CALLS], [(TOOL,)])[0].refused == "tool calls"
    asked = smol([CALLS[:1] + CALLS[3:]], [(TOOL,)])[0]
    assert not asked.refused and asked.unused == ("tools",)


def calling(name="weather", **more):
    call = {"id": "abcdefghi", "type": "function", "function": {"name": name, "arguments": {"town": "Oslo"}}}
    reply = {"role": "assistant", "content": "", "tool_calls": [call]} | more
    return [CALLS[0], reply, CALLS[2] | {"name": name, "tool_call_id": "abcdefghi"}, CALLS[3]]


GPT_OSS_CALL = ' to=functions.weather<|channel|>commentary json<|message|>{"town": "Oslo"}<|call|>'
GEMMA_CALL = '<|tool_call>call:weather{town:<|"|>Oslo<|"|>}<tool_call|><|tool_response>'
BROKEN_UP = {  # one message is several turns, or several messages are one
    "gptoss": (GPT_OSS_CALL, "<|channel|>final<|message|>It rains.", "<|end|>", "<|return|>"),
    "gemma4": (GEMMA_CALL, "It rains.", "<turn|>", "<turn|>"),
    "gemma4_v5": (GEMMA_CALL, "It rains.", "<turn|>", "<turn|>"),
}


@pytest.mark.parametrize("name", BROKEN_UP)
def test_a_call_and_the_answer_after_it_are_in_the_loss_as_the_model_writes_them(smollm2, name):
    call, answer, between, last = BROKEN_UP[name]
    encoder = with_trl_template(smollm2, name)
    twice = [*calling(), *calling()]
    rendered = encoder([calling(), twice, calling(reasoning_content="I ask.")], [(TOOL,)] * 3)
    expected = [call + answer + last, call + answer + between + call + answer + last]
    replies = [encoder.tokenizer.decode(found.ids[found.in_loss]) for found in rendered]
    assert replies[:2] == expected and replies[2].endswith(expected[0])
    for messages, found in zip([calling(), twice], rendered, strict=False):
        assert encoder.template.own_ids(messages, (TOOL,)) == found.ids.tolist()
    unlearned = calling(train=False)
    (found,) = encoder([unlearned], [(TOOL,)])
    assert encoder.tokenizer.decode(found.ids[found.in_loss]) == answer + last


@pytest.mark.parametrize("name", ["gptoss", "gemma4"])
def test_a_reply_whose_words_the_template_moves_or_leaves_out_is_refused_with_the_reason(smollm2, name):
    encoder = with_trl_template(smollm2, name)
    (found,) = encoder([calling(content="Let me look.")], [(TOOL,)])
    assert found.refused == "tool calls whose place in the chat template's text is not certain"
    end = sorted(encoder.control_ids)[-1]
    (forged,) = encoder([[{"role": "user", "content": f"Say {end}"}, *calling()[1:]]], [(TOOL,)])
    assert forged.refused


def test_a_control_token_in_a_tool_call_is_refused(smollm2):
    encoder = with_trl_template(smollm2, "qwen3")
    call = {"type": "function", "function": {"name": "weather", "arguments": {"town": "<|im_end|>"}}}
    messages = [CALLS[0], CALLS[1] | {"tool_calls": [call]}, *CALLS[2:]]
    assert encoder([messages])[0].refused == "control token in a tool call"


@pytest.mark.parametrize("flags", [{"rstrip": True}, {"lstrip": True}, {"lstrip": True, "rstrip": True}])
def test_control_tokens_may_take_white_space(smollm2, flags):
    encoder = with_trl_template(smollm2, "phi3", **flags)
    for messages in (chat("Hi", "It is 2."), chat(" Hi \n", "\n It is 2. \n", "And", "3")):
        encoded = encoder([messages])[0]
        assert encoder.template.own_ids(messages) == encoded.ids.tolist()
        reply = encoder.tokenizer.decode(encoded.ids[encoded.in_loss])
        assert reply.replace(" ", "").replace("\n", "").startswith("Itis2.<|end|>")
        assert "<|user|>" not in reply and "<|assistant|>" not in reply
    refused = encoder([chat("Hi", "It ends with <|end|>")])[0].refused
    assert refused == "control token in a message"


def test_truncation_and_padding_of_the_tokenizer_are_disabled(smol, smollm2):
    tokenizer = load_tokenizer(str(smollm2))
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=64)
    messages = chat("Hi", "one two three four five six seven eight")
    assert Encoder(tokenizer)([messages])[0].ids.tolist() == smol([messages])[0].ids.tolist()


def trained(normalizer, pre_tokenizer, decoder, model, trainer):
    """A small tokenizer of another kind, with ChatML."""
    tokenizer = Tokenizer(model)
    tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder = normalizer, pre_tokenizer, decoder
    tokenizer.train_from_iterator(["the cat sat on the mat and the caf\u00e9 was closed"] * 9, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.chat_template = MARKS.replace("CONTENT", "m.content")
    return fast


KINDS = {
    "composing, as Qwen": lambda control: trained(
        normalizers.NFC(), pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel(), models.BPE(),
        trainers.BpeTrainer(
            vocab_size=320, special_tokens=control, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        ),
    ),
    "SentencePiece-style": lambda control: trained(
        None, pre_tokenizers.Metaspace(prepend_scheme="never"), decoders.Metaspace(prepend_scheme="never"),
        models.Unigram(), trainers.UnigramTrainer(vocab_size=60, special_tokens=["<unk>", *control], unk_token="<unk>"),
    ),
    "with a prefix on the first word": lambda control: trained(
        None, pre_tokenizers.Metaspace(prepend_scheme="first"), decoders.Metaspace(prepend_scheme="first"),
        models.Unigram(), trainers.UnigramTrainer(vocab_size=60, special_tokens=["<unk>", *control], unk_token="<unk>"),
    ),
    "with a prefix on every text": lambda control: trained(
        normalizers.Prepend("\u2581"), pre_tokenizers.Metaspace(prepend_scheme="never"), decoders.Metaspace(),
        models.Unigram(), trainers.UnigramTrainer(vocab_size=60, special_tokens=["<unk>", *control], unk_token="<unk>"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_the_mask_is_exact_for_other_tokenizer_models(kind):
    encoder = Encoder(KINDS[kind](["<|im_start|>", "<|im_end|>"]))
    messages = chat("the cafe\u0301 sat", "the cat  cafe\u0301 closed")  # a letter and its accent as two characters
    assert agrees_with_template(encoder, messages, encoder([messages])[0])
    reply = counted(encoder, messages)
    assert reply.endswith("closed<|im_end|>") and reply.replace(" ", "").startswith("thecatcaf")


def test_gigatoken_gives_the_same_ids_and_mask(llama, fast, real_trees):
    found = [c.messages for _, c in open_source(str(real_trees)).read("en", lambda row, reason: None)]
    for messages, one, other in zip(found, llama(found), fast(found), strict=True):
        assert one.ids.tolist() == other.ids.tolist(), messages
        assert one.labels.tolist() == other.labels.tolist()
    assert fast.engine.uncompared == 0  # at least 256 texts were compared


@given(CONTENTS)
@settings(deadline=None)
def test_gigatoken_agrees_on_any_text(llama, fast, contents):
    messages = chat(*contents, "<|eot_id|>")
    assert fast([messages])[0].labels.tolist() == llama([messages])[0].labels.tolist()


def test_a_differing_engine_is_reported_with_the_first_text(fast, llama31):  # noqa: F811
    wrong = Encoder(load_tokenizer(str(llama31)), engine="gigatoken")

    class Reversed:
        def encode(self, text):
            return fast.engine.gigatoken.encode(text)[::-1]

    wrong.engine.gigatoken = Reversed()
    with pytest.raises(KitError, match=r"gigatoken differs from tokenizers on .*Prepare with engine tokenizers"):
        wrong([chat("one two", "three four")])


def test_a_tokenizer_unknown_to_gigatoken_is_an_error(smollm2):
    pytest.importorskip("gigatoken", reason="the optional engine gigatoken is not installed")
    with pytest.raises(InputError, match=r"cannot take this tokenizer .*use engine tokenizers"):
        Encoder(load_tokenizer(str(smollm2)), engine="gigatoken")
