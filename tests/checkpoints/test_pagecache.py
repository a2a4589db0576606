"""Cold and warm are proven on a real file of the file system that holds the tests."""

import mmap
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kit.checkpoints import pagecache

SIZE = 16 << 20


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(SIZE))
    pagecache.evict([path])
    if pagecache.residency([path]) > 0.01:
        pytest.skip(f"{tmp_path} is on a file system that keeps its pages (tmpfs), so nothing can be cold there")
    return path


def device_bytes_of_reading(path: Path) -> int:
    before = pagecache.device_bytes()
    path.read_bytes()
    return pagecache.device_bytes() - before


def test_an_evicted_file_is_read_from_the_device_and_then_from_memory(file):
    assert pagecache.residency([file]) < 0.01
    assert device_bytes_of_reading(file) > 0.95 * SIZE
    assert pagecache.residency([file]) == 1
    assert device_bytes_of_reading(file) == 0


def test_dirty_pages_are_written_out_and_then_evicted(file):
    file.write_bytes(b"1" * SIZE)
    pagecache.evict([file])
    assert pagecache.residency([file]) < 0.01


def test_warming_reads_every_page_into_memory(file):
    pagecache.warm([file])
    assert pagecache.residency([file]) == 1


def test_residency_counts_over_all_files(file, tmp_path):
    other = tmp_path / "other"
    other.write_bytes(bytes(SIZE))
    (tmp_path / "empty").touch()
    assert pagecache.residency([file, other, tmp_path / "empty"]) == pytest.approx(0.5, abs=0.01)


def test_pages_that_a_process_has_mapped_stay(file):
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[:: mmap.PAGESIZE]) == 0
        pagecache.evict([file])
        assert pagecache.residency([file]) > 0.9


def test_a_folder_is_evictable_unless_a_process_has_its_files_mapped(file, tmp_path):
    assert pagecache.evictable(tmp_path)
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[:: mmap.PAGESIZE]) == 0
        assert not pagecache.evictable(tmp_path)


def test_a_file_system_in_memory_is_not_evictable():
    if not Path("/dev/shm").is_dir():
        pytest.skip("there is no /dev/shm here")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        (Path(folder) / "file").write_bytes(bytes(SIZE))
        assert not pagecache.evictable(Path(folder))


def test_read_bytes_counts_cached_reads_too(file):
    pagecache.warm([file])
    before = pagecache.read_bytes()
    file.read_bytes()
    assert SIZE <= pagecache.read_bytes() - before < SIZE + 10_000


def test_the_module_is_light():
    code = "import sys, kit.checkpoints.pagecache, kit.checkpoints.inspect, kit.deploy.adapter\n"
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False).returncode == 0
