"""A whole cluster on one machine: what `tailrace up` starts and `tailrace down` stops."""
