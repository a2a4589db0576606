"""Makes the ranks of a run draw their shards instead of reading files, and record their GPU memory by phase.

Python imports this module at its start where this folder is on PYTHONPATH.
"""

import os
import sys

WORDS = sys.orig_argv[-3:]

if "RANK" in os.environ and WORDS[:2] == ["-m", "kit.train"] and "accelerate" not in str(sys.orig_argv):
    import json
    import threading
    import time
    from collections import defaultdict
    from pathlib import Path

    import torch

    from kit.train.packed import BLOCK, _state
    from kit.train.shards import ShardedBase

    STD, EVERY_S = 0.02, 0.2
    RUN, THIS_RANK = Path(WORDS[2]), int(os.environ["RANK"])

    def draw(self, part_of, quantise_on):
        """Stands in for ShardedBase._read: matrices of N(0, STD^2), or of 4-bit numbers up to 3 STD, norms of 1."""
        generator = torch.Generator("cuda").manual_seed(THIS_RANK)
        for name, part in part_of.items():
            if name in self.packed:
                weight = self.packed[name]
                part.local.view(torch.uint8).random_(0, 256, generator=generator)
                scales = torch.full((-(-weight.elements // BLOCK),), 3 * STD, device=quantise_on)
                scales[::2] *= 0.9  # they are quantised themselves
                weight.layer.quant_state = _state(scales, weight)
            elif part.local.ndim > 1:
                part.local.normal_(0, STD, generator=generator)
            else:
                part.local.fill_(1.0)
        torch.cuda.synchronize()
        self.load.bytes = sum(part.local.nbytes for part in part_of.values())

    ShardedBase._read = draw

    def record():
        """The most bytes by phase until the process ends, in memory-RANK.json of the run."""
        most = defaultdict(lambda: defaultdict(int))
        while True:
            time.sleep(EVERY_S)
            if not torch.cuda.is_initialized():
                continue
            try:
                phase = json.loads((RUN / "state" / "phase.json").read_text())["phase"]
                free, total = torch.cuda.mem_get_info()
                now = {
                    "allocated": torch.cuda.memory_allocated(),
                    "most_allocated_so_far": torch.cuda.max_memory_allocated(),
                    "reserved": torch.cuda.memory_reserved(),
                    "device": total - free,
                }
                for name, value in now.items():
                    most[phase][name] = max(most[phase][name], value)
                (RUN / f"memory-{THIS_RANK}.json").write_text(json.dumps(most))
            except (OSError, ValueError, KeyError):  # the file is being replaced
                continue

    threading.Thread(target=record, daemon=True).start()
