"""Real runs of lm-eval on a tiny model, through the local runner and through Slurm."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

from kit.deploy import evaluate
from kit.deploy.merge import merge
from kit.errors import InputError, KitError
from tests.conftest import REPOSITORY

needs_lm_eval = pytest.mark.skipif(
    not importlib.util.find_spec("lm_eval"), reason="lm-eval is not installed: pip install 'finetune-kit[eval]'"
)
QUESTIONS = [json.loads(line) for line in (evaluate.TASKS / "facts.jsonl").read_text().splitlines()]


CALLS = """
import contextlib, io, json, sys
from kit.cli import main

ends = []
for words in json.loads(sys.argv[1]):
    texts = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(texts[0]), contextlib.redirect_stderr(texts[1]):
        code = main(["evaluate", *words])
    ends.append([code, *(text.getvalue() for text in texts)])
print(json.dumps(ends))
"""


class Ended(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def kit_evaluate(*calls: Iterable[object], **more: str) -> list[Ended]:
    """Calls of `kit evaluate`, in another process, as lm-eval and what it imports warn of much; they import it once."""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "TOKENIZERS_PARALLELISM": "false"} | more
    command = [sys.executable, "-c", CALLS, json.dumps([[str(word) for word in words] for words in calls])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [Ended(*end) for end in json.loads(done.stdout.splitlines()[-1])]


def score(done: Ended) -> dict[str, float]:
    assert done.returncode == 0, done.stderr
    return {row["metric"]: row["value"] for row in json.loads(done.stdout)["scores"]}


@pytest.fixture
def tuned(tiny, tmp_path) -> Path:
    """An adapter, random and strong, on the tiny model."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = LoraConfig(r=8, lora_alpha=64, target_modules="all-linear", init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(tiny), config).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def picked(folder: Path) -> float:
    """The part of the questions for which the model gives the right answer the largest likelihood; no lm-eval here."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    right = 0
    for asked in QUESTIONS:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": asked["question"]}], add_generation_prompt=True, tokenize=False
        )
        start = len(tokenizer(prompt, add_special_tokens=False).input_ids)
        sums = []
        for choice in asked["choices"]:
            ids = tokenizer(prompt + choice, add_special_tokens=False, return_tensors="pt").input_ids
            with torch.no_grad():
                logs = model(ids).logits[0, start - 1 : -1].log_softmax(-1)
            sums.append(logs.gather(1, ids[0, start:, None]).sum().item())
        right += max(range(len(sums)), key=sums.__getitem__) == asked["answer"]
    return right / len(QUESTIONS)


def test_the_kits_task_has_twenty_questions_and_balanced_answers():
    assert len({q["question"] for q in QUESTIONS}) == 20
    assert all(len(set(q["choices"])) == 4 for q in QUESTIONS)
    assert sorted(q["answer"] for q in QUESTIONS) == sorted([0, 1, 2, 3] * 5)


@needs_lm_eval
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_an_adapter_and_its_merged_model_score_by_their_likelihoods(tiny, tuned, tmp_path):
    merged = merge(tuned, tiny, tmp_path / "merged").path
    both = ((model, tmp_path / name, "--wait", "--json") for model, name in ((tuned, "one"), (merged, "two")))
    of_adapter, of_merged = map(score, kit_evaluate(*both))
    assert of_adapter == of_merged == {"acc": pytest.approx(picked(merged))}
    assert json.loads((tmp_path / "one" / "request.json").read_text())["model"] == {
        "pretrained": str(tiny), "peft": str(tuned),
    }  # fmt: skip


@pytest.fixture
def terse(tiny, tmp_path) -> Path:
    """The tiny model, which stops after its first word: IFEval lets a model write 1280 tokens."""
    from transformers import AutoTokenizer

    folder, words = Path(shutil.copytree(tiny, tmp_path / "terse")), AutoTokenizer.from_pretrained(tiny)
    ends = [n for n in range(len(words)) if n not in words.all_special_ids and re.search(r"\w", words.decode([n]))]
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": ends}))
    return folder


@needs_lm_eval
@pytest.mark.slow
def test_ifeval_runs_as_a_slurm_job_on_prompts_of_a_local_file(terse, live_slurm, tmp_path):
    """Three prompts in IFEval's own schema: one that any answer meets, one that none does, one that is half met."""
    met = ("length_constraints:number_words", {"relation": "at least", "num_words": 1})
    missed = ("keywords:existence", {"keywords": ["quizzaciously"]})
    rows = [
        {
            "key": n,
            "prompt": "Say anything.",
            "instruction_id_list": [i for i, _ in told],
            "kwargs": [k for _, k in told],
        }
        for n, told in enumerate(([met], [missed], [met, missed]))
    ]
    for row in rows:  # IFEval's file names every argument of every instruction
        row["kwargs"] = [{"relation": None, "num_words": None, "keywords": None} | k for k in row["kwargs"]]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "two.toml").write_text(
        'name = "two"\n[nodes]\ncount = 2\ngpus = 0\ncpus = 2\nram_gib = 8\n'
        f'[slurm]\npartition = "gpu"\ntime = "10"\n[paths]\nruns = "{tmp_path}/runs"\n'
    )
    # NLTK's sentences are asked for when IFEval is imported, and used by none of these instructions.
    (tmp_path / "nltk" / "tokenizers" / "punkt_tab").mkdir(parents=True)
    words = ["--tasks", "ifeval", "--data", f"ifeval={tmp_path}/prompts.jsonl", "--cluster", tmp_path / "two.toml"]
    call = (terse, tmp_path / "scores", *words, "--wait", "--json")
    (done,) = kit_evaluate(call, NLTK_DATA=str(tmp_path / "nltk"))
    assert score(done) == {
        "prompt-strict": pytest.approx(1 / 3), "prompt-loose": pytest.approx(1 / 3),
        "inst-strict": pytest.approx(2 / 4), "inst-loose": pytest.approx(2 / 4),
    }  # fmt: skip
    assert "local-" not in json.loads(done.stdout)["job_id"]


MISSING = {
    ("facts,no_such_task",): "lm-eval knows no task 'no_such_task'",
    ("facts", "--data", "facts=/nowhere/facts.jsonl"): "The data of facts cannot be loaded",
    ("arc_easy",): "The data of arc_easy cannot be loaded: Couldn't reach 'allenai/ai2_arc' on the Hub",
}


@needs_lm_eval
@pytest.mark.slow
def test_missing_tasks_and_data_are_reported_before_the_job(tiny, tmp_path):
    ends = kit_evaluate(*((tiny, tmp_path / "out", "--tasks", *words) for words in MISSING))
    for done, message in zip(ends, MISSING.values(), strict=True):
        assert done.returncode == 2
        assert message in done.stderr
    assert not [p for p in tmp_path.iterdir() if "out" in p.name or p.name == "runs"]


@needs_lm_eval
def test_a_missing_model_is_reported_before_the_job(local, tmp_path):
    with pytest.raises(InputError, match="Model 'nowhere'"):
        evaluate.launch(Path("nowhere"), tmp_path / "out", local, ["facts"])


def test_without_lm_eval_the_error_says_what_to_install(tiny, local, tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "lm_eval" else find(name, *more)
    )
    with pytest.raises(InputError, match=r"pip install 'finetune-kit\[eval\]'"):
        evaluate.launch(tiny, tmp_path / "out", local, ["facts"])


def test_scores_of_a_job_that_has_not_ended_raise(tmp_path):
    with pytest.raises(KitError, match=r"scores.json does not exist"):
        evaluate.scores(tmp_path)


def test_scores_have_their_standard_errors(tmp_path):
    """The shape of lm-eval 0.4.13's results, where a list's error is "N/A"."""
    values = {
        "alias": "ifeval", "prompt_level_strict_acc,none": 0.7098, "prompt_level_strict_acc_stderr,none": 0.0195,
        "inst_level_loose_acc,none": 0.8106, "inst_level_loose_acc_stderr,none": "N/A",
    }  # fmt: skip
    found = {"results": {"ifeval": values}, "n-samples": {"ifeval": {"effective": 541}}}
    (tmp_path / "scores.json").write_text(json.dumps(found))
    found = evaluate.scores(tmp_path)
    strict, loose = found.scores
    assert strict == evaluate.Score("ifeval", "prompt-strict", 0.7098, 0.0195, 541)
    assert loose == evaluate.Score("ifeval", "inst-loose", 0.8106, None, 541)
    assert found.as_dict()["scores"][1]["stderr"] is None
    assert "prompt-strict  70.98%" in str(found)
