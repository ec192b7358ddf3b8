"""Random and near-right input for every gRPC method and message stream of a running cluster."""
