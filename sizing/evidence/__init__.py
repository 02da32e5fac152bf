"""Measured rows against predictions: errors by group, intervals, refits."""
