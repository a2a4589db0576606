"""`python -m kit.cli`: the command line."""

import sys

from kit.cli import main

sys.exit(main())
