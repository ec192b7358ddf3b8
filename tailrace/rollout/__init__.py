"""A rolling change of the model behind a served name."""
