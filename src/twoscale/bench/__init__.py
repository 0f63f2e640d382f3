"""Benches: speed, measured as ratios within one run."""
