"""What somebody gets who reaches a cluster's ports and is not one of it."""
