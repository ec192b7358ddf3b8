"""vLLM 0.32's engine-core protocol for processes that do not import vLLM.

vLLM's API server and its engine core exchange ZMQ messages of msgpack: requests one way, outputs the other.
The structs here mirror vLLM's field by field, in its order (vllm/v1/engine/__init__.py). Fields that nobody
reads here stay raw bytes, so that a message that is read, split and written again loses nothing. A test
compares all of it with the installed vLLM.
"""
