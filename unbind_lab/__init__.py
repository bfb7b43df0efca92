"""The lab: Unbind beside the paper's baselines and its strongest rivals, on equal terms. ``unbind lab run``, ``unbind lab table``.

A setting is data (``settings/``), a system a file (``trained/``, ``filters/``), a protocol a file (``protocols/``); ``lab.py`` is
the loop. The service never imports it; it takes of the service the demo's rows and the prompt filter alone.
"""
