"""What one faulty etcd member of three costs: seconds without a leader, staleness of views, streams."""
