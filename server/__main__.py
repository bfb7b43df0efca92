"""``python -m server``: the command line, also where it is not installed."""

from server.cli import main

main()
