"""CascadeInfer: instances specialised by sequence length, in a pipeline of stages (arXiv 2512.19179)."""
