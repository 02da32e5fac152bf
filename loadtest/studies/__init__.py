"""Studies of more than one run: capacity search and comparison."""
