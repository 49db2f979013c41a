"""The rules: pure functions from observations and thresholds to verdicts, one module per subject."""
