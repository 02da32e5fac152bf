"""A plan turned into a running Ray Serve application."""
