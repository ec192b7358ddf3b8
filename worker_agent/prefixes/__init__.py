"""Prefixes of prompts that go from one worker's cache to another's."""
