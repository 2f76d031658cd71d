"""``python -m jitfmha``."""

import sys

from .cli import main

sys.exit(main())
