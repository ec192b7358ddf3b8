"""The prefix cache in the simulator: `placement` by it, copies made `ahead`, and `against_vllm`."""
