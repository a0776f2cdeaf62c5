"""``python -m bytescale``: the same as the command ``bytescale``."""

import sys

from bytescale.cli.main import main

sys.exit(main())
