"""``python -m smp_core.launch`` is ``smp-run``."""

import sys

from smp_core.launch.command import main

sys.exit(main())
