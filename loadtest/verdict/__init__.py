"""What a run proves: measurement window, SLO, prediction beside measurement."""
