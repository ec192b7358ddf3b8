"""How overload by one tenant, or by all, affects the requests that are served."""
