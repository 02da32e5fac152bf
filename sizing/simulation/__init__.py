"""Requests through replicas, event by event: what queues do to each of them."""
