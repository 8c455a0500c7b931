"""Calibration: data in, statistics out."""
