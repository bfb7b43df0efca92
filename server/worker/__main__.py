"""``python -m server.worker [PARENT]``: a worker that takes its settings from the environment; what ``unbind worker`` becomes.

A way in of its own, because the command line imports what the worker never needs.
"""

from __future__ import annotations

import logging
import os
import sys

from server.settings import load_settings
from server.worker.process import main

settings = load_settings(environment=os.environ)
logging.basicConfig(
    level=settings.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)-7s %(name)s %(message)s"
)
main(settings, int(sys.argv[1]) if len(sys.argv) > 1 else None)
