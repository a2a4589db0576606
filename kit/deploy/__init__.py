"""Export, merge, push and evaluate what a run has trained."""

import logging

# PEFT imports bitsandbytes, which warns on CPUs of a kernel that it would fetch from the hub.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
