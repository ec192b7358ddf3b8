"""A fleet that follows `tailrace_desired_instances` for a day, against fixed ones, in the simulator."""
