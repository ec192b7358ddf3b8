"""`tailrace predictor`: samples from a model that vLLM serves, training, and how good the result is."""
