"""The package that the three commands share."""
