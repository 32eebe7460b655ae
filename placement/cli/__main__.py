"""Run the command line as `python -m placement.cli`."""

import sys

from placement.cli import main

sys.exit(main())
