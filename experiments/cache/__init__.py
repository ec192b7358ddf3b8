"""The prefix cache: simulated `placement` by it, copies made `ahead`, the simulator `against_vllm`, and real
workers under several `policies`."""
