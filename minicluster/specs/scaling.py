"""Defaults of the autoscaling policy."""

MARGIN = 0.1
"""Share by which a forecast is exceeded before replicas are short, if nothing else is asked for."""

HOLD_S = 900.0
"""Seconds for which a replica that is no longer needed stays, if nothing else is asked for."""
