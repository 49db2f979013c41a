"""`python -m rltop` is the console script `rltop`."""

import sys

from rltop.cli.main import main

sys.exit(main())
