"""Random and nearly valid input for every gRPC method and message stream of a running cluster."""
