"""The OpenAI-compatible HTTP API, without Ray."""
