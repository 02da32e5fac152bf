"""One replica of an engine: scheduler, KV blocks, prefix cache, seconds of a batch."""
