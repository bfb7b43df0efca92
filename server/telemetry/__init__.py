"""Every Prometheus metric of the service, and the ports of their own that show them.

Labels are module names, phases, routes, states and status codes: nothing that a client invents.
"""
