"""One address for several models: chooses the front ends of each request by the model that it names."""
