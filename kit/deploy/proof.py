"""The proof that a server serves what was trained.

transformers answers some questions with the tuned model and with its base, before the server starts. The server must
make the same token ids of each question, give the tuned model's answers rather than the base's, and agree in
log-probabilities where its API has them.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kit.deploy.servers import ANSWER_TOKENS, Request, Server, user_message

# Mean distance of log-probabilities per token, in nats: kernels in bf16 of two libraries differ by some 0.01.
LOGPROB_TOLERANCE = 0.1


class Outcome(StrEnum):
    """What a check found. Undecided: nothing in the answers tells the tuned model from its base."""

    PASSED = "passed"
    FAILED = "failed"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Check:
    """One line of the proof."""

    name: str
    outcome: Outcome
    detail: str


@dataclass(frozen=True)
class Expected:
    """A question and what transformers answers; without an adapter, tuned model and base are one.

    The log-probabilities are means over the tokens of the tuned model's answer, in nats.
    """

    question: str
    prompt: list[int]
    answer: list[int]
    text: str
    base_text: str
    logprob: float
    base_logprob: float


def expected_answers(request: Request, questions: list[str]) -> list[Expected]:
    """Greedy answers of transformers, on the GPUs of this node or on its CPUs."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from kit.config.models import load_tokenizer

    tokenizer = load_tokenizer(request.base)
    model = AutoModelForCausalLM.from_pretrained(request.base, dtype="auto", device_map="auto", local_files_only=True)
    model = PeftModel.from_pretrained(model, request.adapter) if request.adapter else model
    model.eval()
    found = []
    for question in questions:
        template = {"add_generation_prompt": True, "return_dict": True}
        prompt = list(tokenizer.apply_chat_template(user_message(question), **template)["input_ids"])
        answer = base_answer = _generate(model, prompt, tokenizer.eos_token_id)
        logprob = base_logprob = _logprob(model, prompt, answer)
        if request.adapter:
            with model.disable_adapter():
                base_answer = _generate(model, prompt, tokenizer.eos_token_id)
                base_logprob = _logprob(model, prompt, answer)
        text, base_text = (tokenizer.decode(ids, skip_special_tokens=True) for ids in (answer, base_answer))
        found.append(Expected(question, prompt, answer, text, base_text, logprob, base_logprob))
    return found


def _generate(model: Any, prompt: list[int], end: int) -> list[int]:
    import torch

    ids = torch.tensor([prompt], device=model.device)
    made = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=ANSWER_TOKENS,
        do_sample=False,
        pad_token_id=end,
    )
    return list(map(int, made[0, len(prompt) :]))


def _logprob(model: Any, prompt: list[int], answer: list[int]) -> float:
    import torch

    ids = torch.tensor([prompt + answer], device=model.device)
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
    return float(logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None]).mean())


def prove(server: Server, expected: list[Expected], adapted: bool) -> list[Check]:
    """The checks against a server that answers. Raises KitError where it refuses a request."""
    same = sum(server.same_template(one.question, one.prompt) for one in expected)
    outcome = Outcome.PASSED if same == len(expected) else Outcome.FAILED
    checks = [Check("chat template", outcome, f"{same} of {len(expected)} prompts have the ids of the training rows")]
    served = [str(server.answer(one.question)["choices"][0]["message"]["content"]) for one in expected]
    logprobs = [server.logprob(one.prompt, one.answer) for one in expected]
    known = [value for value in logprobs if value is not None]
    checks.append(_answers(expected, served, adapted, only_evidence=not known))
    if known:
        checks.append(_logprobs(expected, known, adapted))
    return checks


def _answers(expected: list[Expected], served: list[str], adapted: bool, only_evidence: bool) -> Check:
    """More answers are the tuned model's than the base's. Without log-probabilities also at least half of them.

    Rounding lets greedy answers of two libraries differ at some token: 16 of 20 did in bf16 with vLLM.
    """
    pairs = list(zip(expected, served, strict=True))
    telling = [pair for pair in pairs if pair[0].text != pair[0].base_text] if adapted else pairs
    tuned = sum(text.strip() == one.text.strip() for one, text in telling)
    base = sum(text.strip() == one.base_text.strip() for one, text in telling) if adapted else 0
    if not telling:
        detail = f"the adapter changes none of {len(pairs)} answers of {ANSWER_TOKENS} tokens"
        return Check("answers", Outcome.UNDECIDED, detail)
    detail = f"of {len(telling)} answers, {tuned} are those of the trained model"
    detail += f", {base} those of the base without the adapter" if adapted else ""
    enough = 2 * tuned >= len(telling) or not only_evidence
    return Check("answers", Outcome.PASSED if tuned > base and enough else Outcome.FAILED, detail)


def _logprobs(expected: list[Expected], served: list[float], adapted: bool) -> Check:
    """The served log-probabilities must be near the tuned model's, and nearer than to the base's."""
    tuned = _mean_distance(served, [one.logprob for one in expected])
    base = _mean_distance(served, [one.base_logprob for one in expected])
    detail = f"{tuned:.4f} nats per token from the trained model" + (f", {base:.4f} from the base" if adapted else "")
    good = tuned <= LOGPROB_TOLERANCE and (not adapted or tuned < base)
    return Check("log-probabilities", Outcome.PASSED if good else Outcome.FAILED, detail)


def _mean_distance(left: list[float], right: list[float]) -> float:
    return sum(abs(one - other) for one, other in zip(left, right, strict=True)) / len(left)
