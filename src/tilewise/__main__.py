"""`python -m tilewise` is `tilewise`."""

import sys

from .cli import main

sys.exit(main())
