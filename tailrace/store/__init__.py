"""etcd, behind one module: membership, pools, stages, leadership, settings."""
