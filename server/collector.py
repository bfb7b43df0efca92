"""Python's collector of garbage, and the half a million objects that importing torch and transformers makes, which stay.

It looks through all of them again and again while they come, and once more as a process ends: seconds of work that finds nothing.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import sys
from contextlib import suppress

# After so many collections of younger objects what is older is looked through; the second is Python's own.
SELDOM, AS_EVER = 1000, 10


def spare_what_stays() -> None:
    """Have it look through old objects seldom in this process, and not at all as that ends."""
    gc.set_threshold(*gc.get_threshold()[:2], SELDOM)
    atexit.register(_pass_over)


def _pass_over() -> None:
    if "triton" in sys.modules:  # which complains at length of what is left
        gc.unfreeze()
    else:
        gc.freeze()


def leave_out_what_stays() -> None:
    """Have it pass over what a started server has: the objects of one large body, as a list of empty lists, have it look through
    everything again and again, seconds in which nobody is answered. What comes from here on is looked through as ever.
    """
    gc.collect()  # else what is garbage by now would stay as well
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], AS_EVER)


def leave_at_once() -> None:
    """End this process, once it has put everything away, without taking its objects apart: for one of which nobody asks how it
    ended, as those that vLLM starts.
    """
    atexit.register(_leave)


def _leave() -> None:
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # closed, or never there: nobody is left to tell
            stream.flush()
    os._exit(0)
