"""File systems: which ones the profile's paths are on, how full they are, and what one process writes and reads."""

import contextlib
import os
import re
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kit.check.facts import Finding, within
from kit.checkpoints import pagecache
from kit.config.cluster import Cluster
from kit.errors import KitError

SIZE, BLOCK, LIMIT = 256 << 20, 8 << 20, 2.0  # bytes of a trial file, bytes per call, seconds to write it or read it
NETWORKED = ("nfs", "lustre", "beegfs", "mergerfs", "gpfs", "ceph", "wekafs", "cifs", "glusterfs", "sshfs", "juicefs")
SCRATCH = "scratch"
PATHS = {"runs", "hf_home", SCRATCH}  # uses that are not storage tables of a profile


@dataclass
class Mount:
    """A mounted file system, and the folders on it by their use: runs, hf_home, scratch or a storage of the profile."""

    target: str
    source: str
    kind: str
    uses: dict[str, Path] = field(default_factory=dict)


def find_mounts(cluster: Cluster, table: str = "") -> list[Finding]:
    """File systems of the profile's paths and of scratch, each measured; then every other network file system.

    `table` is the text of /proc/mounts.
    """
    known = _read_mounts(table or Path("/proc/mounts").read_text())
    paths = {"runs": cluster.paths.runs, "hf_home": cluster.paths.hf_home, SCRATCH: tempfile.gettempdir()}
    absent = []
    for use, path in (paths | {name: storage.path for name, storage in cluster.storage.items()}).items():
        if not path:
            continue
        folder, exists = Path(path).absolute(), True
        with contextlib.suppress(TimeoutError):  # _examine reports it
            folder, exists = within(5, _nearest_existing, folder)
        if use in cluster.storage and not exists:
            todo = "mount it, or correct [storage] of the profile"
            absent.append(Finding(f"storage {use}", f"{path} is not there", "profile", todo))
            continue
        target = max((target for target in known if folder.is_relative_to(target)), key=len)
        known[target].uses[use] = folder
    used = [mount for mount in known.values() if mount.uses]
    used.sort(key=lambda mount: min(list(paths).index(use) if use in paths else len(paths) for use in mount.uses))
    others = [mount for mount in known.values() if not mount.uses and mount.kind in NETWORKED]
    return [*map(_examine, used), *map(_examine, others), *absent]


def _read_mounts(table: str) -> dict[str, Mount]:
    found = {}
    for line in table.splitlines():
        source, target, kind, *_ = line.split()
        plain = re.sub(r"^fuse\.|_nodev$|(?<=nfs)\d", "", kind)
        target = target.replace("\\040", " ")
        found[target] = Mount(target, source, plain)
    return found


def _nearest_existing(path: Path) -> tuple[Path, bool]:
    """The path, or its nearest parent that exists, with links followed; and whether it is the path itself."""
    resolved = path.resolve()
    found = next(parent for parent in (resolved, *resolved.parents) if parent.exists())
    return found, found == resolved


def _examine(mount: Mount) -> Finding:
    """Free space of a mount, and the rates of the first of its folders."""
    uses = set(mount.uses) - {SCRATCH}
    value, problem = f"{mount.kind} from {mount.source}", ""
    if mount.uses:
        value += f" ({', '.join(mount.uses)})"
    facts: dict[str, Any] = {}
    try:
        space = within(5, shutil.disk_usage, mount.target)
        value += f", {space.free / 1e9:,.0f} of {space.total / 1e9:,.0f} GB free"
        full = space.free < 4 * SIZE
        if full and uses:
            problem = "nearly full: free space, or set another path"
        if mount.uses and not full:
            wrote, read, cold = within(60, measure, next(iter(mount.uses.values())))
            value += f"; writes {wrote:.2g}, reads {read:.2g} GB/s{'' if cold else ' from memory'}"
            facts = {"mount": mount.target, "write_gb_s": wrote, "read_gb_s": read}
            if uses and uses <= PATHS:  # the profile has no storage table for this mount
                name = re.sub(r"\W+", "_", mount.target.strip("/")) or "root"
                table = {"path": mount.target, "kind": mount.kind, "gb_s": round(min(wrote, read), 2)}
                facts[f"storage.{name}"] = table
    except TimeoutError:
        problem = "it does not answer: its server may be gone"
    except OSError as error:
        problem = f"{', '.join(map(str, mount.uses.values()))}: {error.strerror}; set another path"
    return Finding(f"mount {mount.target}", value, f"/proc/mounts, a file of {SIZE >> 20} MiB", problem, facts)


def measure(folder: Path) -> tuple[float, float, bool]:
    """GB/s that one process wrote to disk and read back, and whether the file was evicted from memory in between.

    Writes a temporary file of SIZE bytes, for at most LIMIT seconds, and reads for as long.
    """
    block = os.urandom(BLOCK)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".trial-", buffering=0) as stream:
        start, path = time.perf_counter(), Path(stream.name)
        while stream.tell() < SIZE and time.perf_counter() < start + LIMIT:
            stream.write(block)
            if stream.tell() % (4 * BLOCK) == 0:
                os.fsync(stream.fileno())  # now and then, so that a slow disk ends in time
        os.fsync(stream.fileno())
        wrote = stream.tell() / (time.perf_counter() - start) / 1e9
        pagecache.evict([path])
        cold = False
        with contextlib.suppress(KitError):  # a file system that maps no files
            cold = pagecache.residency([path]) < 0.05
        stream.seek(0)
        start = time.perf_counter()
        while time.perf_counter() < start + LIMIT and stream.read(BLOCK):
            pass
        return wrote, stream.tell() / (time.perf_counter() - start) / 1e9, cold
