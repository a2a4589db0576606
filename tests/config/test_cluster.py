import math

import pytest

from kit.config.cluster import Cluster, Gres, Slurm, gpus_of, gres_for, parse_gres, parse_time_limit
from kit.errors import InputError
from tests.conftest import REPOSITORY


@pytest.mark.parametrize("path", sorted((REPOSITORY / "env/clusters").glob("*.toml")), ids=lambda p: p.stem)
def test_every_shipped_cluster_loads_and_survives_a_round_trip(path, tmp_path):
    cluster = Cluster.load(path)
    (tmp_path / "c.toml").write_text(cluster.toml())
    assert Cluster.load(tmp_path / "c.toml") == cluster


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[nodes]\ngpus = -1\n", ["nodes.gpus", "-1", "at least 0"]),
        ("[nodes]\ngpu_bf16_tflops = inf\n", ["nodes.gpu_bf16_tflops", "inf", "a finite number"]),
        ('[links]\nintra = { kind = "x", efficiency = 2 }\n', ["links.intra.efficiency", "between 0.01 and 1"]),
        ("[links]\nintra = { gb_s = 2 }\n", ["links.intra.kind", "missing"]),
        ('[storage.pool]\npath = "/pool"\ngbs = 2\n', ["storage.pool", "'gbs'", "did you mean 'gb_s'"]),
        ("[environment]\nNCCL_IB_DISABLE = 1\n", ["environment.NCCL_IB_DISABLE", "is 1", "text"]),
        ('[slurm]\ntime = "2 days"\n', ["slurm.time", "'2 days'", "time limit", "48:00:00"]),
        ('[slurm]\npartition = "gpu\\ntouch x"\n', ["slurm.partition", "one line"]),
        ('[slurm]\naccount = "a\\rb"\n', ["slurm.account", "one line"]),
        ('[slurm]\ngres = "gpu:1\\ntouch x"\n', ["slurm.gres", "one line"]),
        ('[slurm]\noptions = ["--qos=a\\ntouch x"]\n', ["slurm.options", "one line"]),
        ('[slurm]\ntime = "90\\n"\n', ["slurm.time", "one line"]),
        ('[paths]\nruns = "a\\nb"\n', ["paths.runs", "one line"]),
        ('[environment]\n"A=1; touch x; export B" = "2"\n', ["environment", "not the name of an environment"]),
        ('[environment]\nMY-VAR = "2"\n', ["environment", "'MY-VAR' is not the name"]),
        ('[slurm.container]\nkind = "docker"\n', ["slurm.container.kind", "'docker'", "pyxis"]),
    ],
)
def test_a_wrong_profile_is_named_with_what_is_valid(tmp_path, text, words):
    (tmp_path / "c.toml").write_text(f'name = "x"\n{text}')
    with pytest.raises(InputError) as caught:
        Cluster.load(tmp_path / "c.toml")
    assert all(word in str(caught.value) for word in ["c.toml: ", *words]), caught.value


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800), ("2:30", 150), ("30:00", 1800), ("48:00:00", 172_800), ("1-2", 93_600), ("1-12", 129_600),
        ("1-2:30", 95_400), ("1-0:0:1", 86_401), ("0-0:30", 1800),
        ("UNLIMITED", math.inf), ("infinite", math.inf), ("-1", math.inf), ("0", math.inf),
    ],
)  # fmt: skip
def test_a_time_limit_is_read_as_sbatch_reads_it(text, seconds):
    """Source: sbatch(1), --time."""
    assert parse_time_limit(text) == Slurm(time=text).limit_s == seconds


def test_a_profile_without_a_time_limit_has_none():
    assert Slurm().limit_s == math.inf


@pytest.mark.parametrize("text", ["", "2h", "1:2:3:4", "1-2:3:4:5", "a-1", "12.5", "-5"])
def test_other_text_is_not_a_time_limit(text):
    with pytest.raises(InputError, match="not a time limit"):
        parse_time_limit(text)


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("gpu:8", [Gres("gpu", "", 8)]),
        ("gpu", [Gres("gpu", "", 1)]),
        ("gpu:a100", [Gres("gpu", "a100", 1)]),
        ("gpu:a100:8,nvme:1", [Gres("gpu", "a100", 8), Gres("nvme", "", 1)]),
        ("gpu:h100:8(S:0-1),nvme:1", [Gres("gpu", "h100", 8), Gres("nvme", "", 1)]),
        ("gpu:a100:4(IDX:0,2-4),gpu:v100:2", [Gres("gpu", "a100", 4), Gres("gpu", "v100", 2)]),
        ("gpu:a100_1g.5gb:2", [Gres("gpu", "a100_1g.5gb", 2)]),
        ("gres/gpu:2, license:matlab:1", [Gres("gpu", "", 2), Gres("license", "matlab", 1)]),
        ("bandwidth:lustre:no_consume:4G", [Gres("bandwidth", "lustre", 4 << 30)]),
        ("(null)", []),
        ("", []),
    ],
)
def test_every_form_of_gres_is_read(text, entries):
    """Source: slurm.conf(5), Gres; scontrol show node."""
    assert parse_gres(text) == entries


@pytest.mark.parametrize(
    ("gres", "kind", "count"),
    [
        ("gpu:8", "", 8), ("gpu:h100:8(S:0-1),nvme:1", "", 8), ("gpu:a100:4(IDX:0-3),gpu:v100:2", "", 6),
        ("gpu:a100:4(IDX:0-3),gpu:v100:2", "v100", 2), ("(null)", "", 0), ("mps:100", "", 0),
    ],
)  # fmt: skip
def test_gpus_are_counted_in_every_form_of_gres(gres, kind, count):
    assert gpus_of(gres, kind) == count


@pytest.mark.parametrize(
    ("gres", "asked"),
    [
        ("gpu:a100:8,nvme:1", "gpu:a100:4,nvme:1"), ("nvme:1,gpu:8", "nvme:1,gpu:4"), ("gpu", "gpu:4"),
        ("gpu:a100", "gpu:a100:4"), ("gpu:a100:4,gpu:v100:4", "gpu:a100:4,gpu:v100:4"), ("nvme:1", "nvme:1"),
    ],
)  # fmt: skip
def test_a_job_asks_for_its_gpus_and_keeps_other_resources(gres, asked):
    assert gres_for(gres, 4) == asked


@pytest.mark.parametrize("name", ["local", "two-node-pcie", "h100-8x8"])
def test_a_profile_without_its_defaults_loads_to_an_equal_cluster(name, tmp_path):
    cluster = Cluster.load(name)
    (tmp_path / "short.toml").write_text(cluster.toml(defaults=False))
    assert Cluster.load(tmp_path / "short.toml") == cluster
    assert len(cluster.toml(defaults=False)) < len(cluster.toml())
