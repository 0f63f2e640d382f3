"""Traces become geometry: pure functions on states, and running statistics over a text."""

from twoscale.geometry.drift import drift_to_loop
from twoscale.geometry.pca import PCA, pca
from twoscale.geometry.record import GeometryStats, measure, measure_limit, token_statistics
from twoscale.geometry.spectrum import loop_spectral_radius, spectral_radius
from twoscale.geometry.steps import (
    VERDICTS,
    accelerations,
    contraction_rate,
    distances,
    radial_tangential,
    relative_step_norms,
    step_cosines,
    step_norms,
    verdicts,
)

__all__ = [
    "PCA",
    "VERDICTS",
    "GeometryStats",
    "accelerations",
    "contraction_rate",
    "distances",
    "drift_to_loop",
    "loop_spectral_radius",
    "measure",
    "measure_limit",
    "pca",
    "radial_tangential",
    "relative_step_norms",
    "spectral_radius",
    "step_cosines",
    "step_norms",
    "token_statistics",
    "verdicts",
]
