"""Measured rows against predictions: errors by group, intervals, scalars of a calibration."""
