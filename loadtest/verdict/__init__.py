"""The verdict of a run: measurement window, SLO, prediction beside measurement."""
