"""`python -m rltop` is the console script `rltop`."""

import sys

from rltop.cli.main import main

code = main()
# Of an interrupt that came out of an `exec` of text (every dataclass is made by one) Python remembers that it was not
# caught, though it was, and `python -m` then dies of SIGINT instead of giving the exit code. The next one forgets it.
exec("")
sys.exit(code)
