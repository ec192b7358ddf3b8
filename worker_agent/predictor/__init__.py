"""`tailrace predictor`: collect samples from a model in vLLM, train a length predictor, and evaluate it."""
