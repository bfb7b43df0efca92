"""Rows to a calibrated module: detector, output axis, thresholds, strength."""
