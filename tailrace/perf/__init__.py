"""Performance models: pure functions of profiles and measurements."""
