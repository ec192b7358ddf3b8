"""Every policy in every paper's scenario, and in a mix of them."""
