"""What DDPO adds to diffusers: the log-probability of a DDIM step, and sampling that keeps every step."""
