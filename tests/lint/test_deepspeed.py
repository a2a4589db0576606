"""The linter's findings in config files of DeepSpeed, and its table of keys compared with DeepSpeed's own models."""

import json
import subprocess
import sys

import pytest

from kit.lint.deepspeed import IGNORED, REFUSED, lint_deepspeed
from kit.slurm.linting import lint_scripts
from kit.trainers import deepspeed
from tests.conftest import SHARED, oracle

MODELS = """
import json
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig

MODELS = {
    "zero_optimization": DeepSpeedZeroConfig,
    "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
    "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
    "fp16": DeepSpeedFP16Config,
    "bf16": DeepSpeedBF16Config,
}
names = {
    section: sorted({name for key, field in model.model_fields.items() for name in (key, field.alias) if name})
    for section, model in MODELS.items()
}
strict = {model.model_config["extra"] for model in MODELS.values()}
print(json.dumps({"names": names | {"aio": sorted(AIO_DEFAULT_DICT)}, "extra": sorted(strict)}))
"""


@pytest.mark.slow
def test_the_table_has_the_keys_of_deepspeeds_own_models_which_refuse_others():
    package = oracle("deepspeed-0.19.8")
    command = [sys.executable, "-c", MODELS]
    output = subprocess.run(
        command, env={"PYTHONPATH": str(package)}, capture_output=True, text=True, check=True
    ).stdout
    found = json.loads(output.splitlines()[-1])
    assert found["extra"] == ["forbid"]
    assert found["names"] == {section: sorted(names) for section, names in (REFUSED | IGNORED).items()}


def test_the_production_tested_file_is_refused_for_two_keys_and_its_comments(tmp_path):
    seed = next((SHARED / "seeds").glob("003_*"), None) if (SHARED / "seeds").is_dir() else None
    if seed is None:
        pytest.skip(f"the document with the file is not in {SHARED}; set KIT_SHARED to a folder that has seeds/003_*")
    text = seed.read_text()
    config = text[text.index("{\n") : text.index("\nStorage Requirements")]
    path = tmp_path / "ds_config_70b.json"
    path.write_text(config)
    found = [
        (finding.rule, finding.severity, finding.message.partition(":")[0]) for finding in lint_scripts([path]).findings
    ]
    refused = ", and DeepSpeed 0.19.8 refuses the file."
    assert found == [
        ("KS702", "error", "accelerate and transformers read the file as plain JSON, which has no comments."),
        ("KS701", "error", f'"buffer_size" is not a key of zero_optimization.offload_optimizer{refused}'),
        ("KS701", "error", f'"aio" is not a key of zero_optimization{refused}'),
        ("KS701", "warning", '"thread_count" is not a key of zero_optimization.aio'),
    ]


def test_each_finding_names_the_line_and_what_to_do():
    text = (
        '{\n "zero_optimization": {\n  "stage": 3,\n  "aio": {"thread_count": 8}\n },\n "aio": {"block_size": 1}\n}\n'
    )
    moved, unread = lint_deepspeed(text, "zero.json")
    assert (moved.line, moved.fix) == (4, "Move aio to the top level.")
    assert (unread.line, unread.severity, unread.fix) == (4, "warning", "Remove thread_count.")
    assert lint_deepspeed(text.replace(',\n  "aio": {"thread_count": 8}', ""), "zero.json") == []


def test_keys_in_values_and_addresses_are_no_keys_or_comments():
    assert (
        lint_deepspeed('{"wandb": {"host": "http://x//y", "note": "{\\"stage\\": {"}, "bf16": {"enabled": true}}', "z")
        == []
    )


@pytest.mark.parametrize("strategy", deepspeed.STAGES)
def test_what_the_kit_renders_has_no_findings(recipe, local, tmp_path, strategy):
    job = recipe.override(**{"parallel.strategy": strategy, "parallel.offload": "cpu"})
    assert lint_deepspeed(deepspeed.render_deepspeed(job, local, tmp_path), "deepspeed.json") == []
