"""One tritonserver: where it is found, how it is started, told, watched from outside and cleared away."""
