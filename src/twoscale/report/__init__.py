"""Saved numbers become figures, verdicts and a page. Pure functions of the files; no torch."""
