"""Pure functions of a request's body: validation, lengths, path and retries."""
