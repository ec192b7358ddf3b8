"""Length prediction as in ARES, section 4: how many tokens a running request still makes.

A small MLP reads the hidden state from which the served model is about to make its next token. What is here
knows no engine and no service: samples, their split, training, evaluation, and the trained predictor's file.
torch and safetensors, which come with an engine, are imported only by the modules that compute with them.
"""
