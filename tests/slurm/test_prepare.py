from pathlib import Path

import pytest

from kit.config.cluster import Cluster
from kit.data.dataset import find_prepared, prepare
from kit.errors import InputError
from kit.slurm import prepare as batch


def test_without_slurm_the_error_says_what_to_do_instead(recipe, local):
    with pytest.raises(InputError, match="--workers"):
        batch.submit(recipe, local, Path("prepared"), 2)


@pytest.mark.slow
def test_an_array_and_its_merge_write_the_bytes_of_one_process(recipe, live_slurm, tmp_path):
    (tmp_path / "c.toml").write_text(
        'name = "two"\n[nodes]\ncount = 2\ngpus = 0\ncpus = 2\nram_gib = 8\n'
        f'[slurm]\npartition = "gpu"\ntime = "10"\n[paths]\nruns = "{tmp_path}/runs"\n'
    )
    jobs = batch.submit(recipe, Cluster.load(tmp_path / "c.toml"), tmp_path / "many", 3)
    end = jobs.merging.wait(timeout=120)
    assert end.state == "COMPLETED", jobs.merging.log.read_text() + str(jobs.encoding.tail())
    assert {s.state for s in jobs.encoding.task_states().values()} == {"COMPLETED"}
    alone = prepare(recipe, tmp_path / "one")
    together = find_prepared(recipe, tmp_path / "many")
    assert together.manifest["digest"] == alone.manifest["digest"]
    for path in alone.path.rglob("*.arrow"):
        assert path.read_bytes() == (together.path / path.relative_to(alone.path)).read_bytes()
