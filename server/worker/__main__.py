"""``python -m server.worker [PARENT]``: a worker that takes its settings from the environment; what ``unbind worker`` becomes.

A way in of its own, because the command line imports what the worker never needs.
"""

from __future__ import annotations

import os
import sys

from server.logs import set_up_logging
from server.sources import load_settings
from server.worker.process import main

settings = load_settings(environment=os.environ)
set_up_logging(settings.log_level, settings.log_format)
main(settings, int(sys.argv[1]) if len(sys.argv) > 1 else None)
