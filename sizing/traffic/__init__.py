"""From step times to percentiles: queues, the prefill → KV → decode tandem, distributions."""
