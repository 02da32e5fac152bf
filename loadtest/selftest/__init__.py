"""The client's own error, measured against a mock server of known timings."""
