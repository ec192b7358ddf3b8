"""A complete cluster on one machine: `tailrace up`, `tailrace restart` and `tailrace down`."""
