"""The watcher: one background process per user that records how runs ended before Slurm forgets them.

Run by `enlist` as `python -m kit.slurm.watcher`; it ends by itself when no watched run is left.
"""

import contextlib
import fcntl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kit import files
from kit.errors import KitError
from kit.slurm import client, evidence
from kit.slurm.folder import RunFolder

UNHEARD_AFTER = 600  # seconds after which a job that Slurm does not know was never submitted
LONGEST_SLEEP = 60.0


def enlist(run: RunFolder) -> None:
    """Have the run watched until it ends, also after this kernel; starts the watcher where it does not run."""
    with _watched() as paths:
        paths.append(str(run.path))
    # sh ends at once, so the watcher is not a child of this process and leaves no zombie.
    command = ["sh", "-c", '"$@" &', "sh", sys.executable, "-m", "kit.slurm.watcher"]
    with client.shared_file("watcher").with_suffix(".log").open("w") as log:
        subprocess.run(
            command, start_new_session=True, cwd=files.REPOSITORY, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )


@contextmanager
def _watched() -> Iterator[list[str]]:
    """The paths of the watched runs, locked; changes to the list are saved at the end."""
    path = client.shared_file("watched")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        stream.seek(0)
        paths = stream.read().split("\n")[:-1]
        yield paths
        stream.truncate(0)
        stream.writelines(f"{path}\n" for path in paths)


def watch() -> None:
    """Ask Slurm about the watched runs, often enough that no end is forgotten, until all have ended."""
    with client.shared_file("watcher").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # another process is the watcher
        ended: set[str] = set()
        first_seen: dict[str, float] = {}
        while True:
            with _watched() as paths:
                paths[:] = [path for path in dict.fromkeys(paths) if path not in ended]
                if not paths:
                    fcntl.flock(lock, fcntl.LOCK_UN)  # before the list is unlocked, so that no new run is missed
                    return
                watched = list(paths)
            with contextlib.suppress(OSError, KitError):  # all in one question; a damaged run is met again below
                evidence.collect([RunFolder(Path(path)) for path in watched])
            now = time.monotonic()
            ended = {path for path in watched if not _update(Path(path), now - first_seen.setdefault(path, now))}
            queue = client.queue()
            if queue.no_cluster:
                return
            time.sleep(min(max(1.0, queue.next_question - time.time()), LONGEST_SLEEP))


def _update(path: Path, watched_s: float) -> bool:
    """Record the news of one run, watched for so many seconds. Returns whether it is still to be watched."""
    try:
        run = RunFolder(path)
        news = evidence.collect([run])  # also finds a job by its script
        if run.job_id is None:
            return watched_s < UNHEARD_AFTER
        return bool(news.unwritten) or not evidence.state_of(run).ended
    except KitError:  # run.json is absent or damaged, and is written in one step
        return False
    except OSError:  # such as a full disk, or a file system that does not answer now
        return True


if __name__ == "__main__":
    watch()
