"""Transfer of cached prefixes between workers."""
