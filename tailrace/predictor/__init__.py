"""Length prediction as in ARES, section 4: how many more tokens a running request will generate.

A small MLP reads the hidden state from which the served model is about to generate its next token. This
package knows no engine and no service; it contains samples, their split, training, evaluation, and the file
of a trained predictor. torch and safetensors, which come with an engine, are imported only by the modules
that compute with them.
"""
