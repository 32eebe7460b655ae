"""`python -m placement`."""

import sys

from placement.cli import main

sys.exit(main())
