"""Requests through replicas, event by event: what queues do to each of them."""

import minicluster  # noqa: F401 - lets Python find the compiled modules of this package
