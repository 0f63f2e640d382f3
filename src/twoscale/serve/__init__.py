"""Many requests at once on the engine's rows."""
