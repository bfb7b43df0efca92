"""The service around ``unbind_core``: API, engine, policy, registry, worker, console and command line."""
