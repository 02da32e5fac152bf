"""A run on the terminal, as an HTML page, as JUnit XML."""
